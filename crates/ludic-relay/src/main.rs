//! The first process of a sandbox without a network: serves the gateway's socket file on a port of
//! the sandbox's loopback device, and runs the agent.
//!
//! `relay SOCKET PORT COMMAND...` reads limits and variables of the command (`read_told`), which as
//! arguments every user could see. It ends as the command did, or at once when its input ends: then
//! no process waits for it. Without a command it writes "ready", and waits for its input to end.
//! `relay` alone is the first process of a container: it reaps orphans until it gets SIGTERM.
//!
//! All its threads start before the command, since an agent may use up the processes it is allowed.
use std::ffi::{OsStr, c_int, c_ulong};
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::{ffi::OsStrExt, net::UnixStream, process::ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio, exit};
use std::rc::Rc;
use std::time::Duration;
use std::{env, thread};

const POLLIN: i16 = 1;
const POLLOUT: i16 = 4;
const SIGTERM: c_int = 15;
const SIGCHLD: c_int = 17;
const SIG_IGN: usize = 1;

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: i16,
    ready: i16,
}

unsafe extern "C" {
    fn poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn setrlimit(resource: c_int, soft_and_hard: *const [c_ulong; 2]) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn pause() -> c_int;
    fn _exit(code: c_int) -> !;
}

fn main() -> io::Result<()> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [socket, port, argv @ ..] = &arguments[..] else { wait_for_term() };
    let mut command = Command::new(argv.first().unwrap_or(socket));
    command.args(argv.iter().skip(1)).stdin(Stdio::null());
    let limits = read_told(&mut io::stdin().lock(), &mut command)?;
    let port = port.to_str().and_then(|text| text.parse().ok()).ok_or(ErrorKind::InvalidInput)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let socket = socket.clone();
    thread::spawn(move || serve(&listener, &socket));
    thread::spawn(|| {
        let _ = io::stdin().read(&mut [0]);
        exit(1)
    });
    for (resource, most) in limits {
        if unsafe { setrlimit(resource, &[most, most]) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let Some(program) = argv.first() else {
        println!("ready");
        wait_for_term()
    };
    let pid = match command.spawn() {
        Ok(child) => child.id() as c_int,
        Err(error) => {
            eprintln!("{} cannot be started: {error}", program.display());
            exit(127)
        }
    };
    loop {
        let mut status = 0; // also of orphans, which are children of the first process of a sandbox
        if unsafe { waitpid(-1, &mut status, 0) } == pid {
            let ended = ExitStatus::from_raw(status);
            exit(ended.code().or(ended.signal().map(|number| 128 + number)).unwrap_or(1));
        }
    }
}

/// Reads a line of limits, such as `nproc=512`, and gives the command its variables: each is its
/// length in bytes, a colon, and NAME=VALUE. An empty one is the last. Returns the limits.
fn read_told(input: &mut impl BufRead, command: &mut Command) -> io::Result<Vec<(c_int, c_ulong)>> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    let read = |limit: &str| match limit.split_once('=')? {
        ("fsize", most) => Some((1, most.parse().ok()?)),
        ("nproc", most) => Some((6, most.parse().ok()?)),
        _ => None,
    };
    let limits = line.split_whitespace().map(read).collect::<Option<_>>().ok_or(ErrorKind::InvalidData)?;
    loop {
        let mut length = Vec::new();
        input.read_until(b':', &mut length)?;
        let length = str::from_utf8(&length).ok().and_then(|text| text.strip_suffix(':')?.parse().ok());
        let mut variable = vec![0; length.ok_or(ErrorKind::InvalidData)?];
        input.read_exact(&mut variable)?;
        let mut parts = variable.splitn(2, |&byte| byte == b'=').map(OsStr::from_bytes);
        match (parts.next(), parts.next()) {
            (Some(name), Some(value)) => command.env(name, value),
            _ => return Ok(limits),
        };
    }
}

/// One direction of a connection.
struct Pump {
    from: Rc<UnixStream>,
    to: Rc<UnixStream>,
    data: Vec<u8>,
}

impl Pump {
    /// What it waits for: to read, or to write what was read.
    fn awaited(&self) -> PollFd {
        let (stream, events) = if self.data.is_empty() { (&self.from, POLLIN) } else { (&self.to, POLLOUT) };
        PollFd { fd: stream.as_raw_fd(), events, ready: 0 }
    }

    /// Moves some data. An error if it has to wait, or at the end of the stream.
    fn advance(&mut self) -> io::Result<()> {
        if self.data.is_empty() {
            let mut read = [0; 1 << 16];
            let size = (&*self.from).read(&mut read)?;
            self.data.extend_from_slice(&read[..size]);
        }
        let written = (&*self.to).write(&self.data)?;
        self.data.drain(..written);
        if written == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// Advances; false when this direction has ended, which the other may outlast.
    fn goes_on(&mut self) -> bool {
        let goes_on = match self.advance() {
            Ok(()) => true,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        };
        if !goes_on {
            let _ = self.to.shutdown(Shutdown::Write);
        }
        goes_on
    }
}

/// Accepts connections and pumps them, in one thread.
fn serve(listener: &TcpListener, socket: &OsStr) {
    let mut pumps: Vec<Pump> = Vec::new();
    loop {
        let mut awaited: Vec<_> = pumps.iter().map(Pump::awaited).collect();
        awaited.push(PollFd { fd: listener.as_raw_fd(), events: POLLIN, ready: 0 });
        unsafe { poll(awaited.as_mut_ptr(), awaited.len() as c_ulong, -1) };
        let mut ready = awaited.iter().map(|each| each.ready != 0);
        pumps.retain_mut(|pump| ready.next() != Some(true) || pump.goes_on());
        if ready.next() == Some(true) {
            match connect(listener, socket) {
                Ok(both) => pumps.extend(both),
                Err(_) => thread::sleep(Duration::from_millis(10)), // there may be no file left to open
            }
        }
    }
}

fn connect(listener: &TcpListener, socket: &OsStr) -> io::Result<[Pump; 2]> {
    // A socket is a socket: one type for both kinds.
    let near = Rc::new(UnixStream::from(OwnedFd::from(listener.accept()?.0)));
    let far = Rc::new(UnixStream::connect(socket)?);
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    let pump =
        |from: &Rc<UnixStream>, to: &Rc<UnixStream>| Pump { from: from.clone(), to: to.clone(), data: Vec::new() };
    Ok([pump(&near, &far), pump(&far, &near)])
}

extern "C" fn end(_: c_int) {
    unsafe { _exit(0) }
}

fn wait_for_term() -> ! {
    unsafe {
        signal(SIGCHLD, SIG_IGN); // the kernel reaps
        signal(SIGTERM, end as extern "C" fn(c_int) as usize); // which it would not deliver to a first process
        loop {
            pause();
        }
    }
}
