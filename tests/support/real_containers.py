"""A Docker daemon and a Podman of a test's own, and an image for both: links into this machine's
/usr, which containers have read-only. Nothing is left of them.

Programs that are not on PATH are taken from target/ (`make containers` fetches them). They need
root.
"""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludic.envs.code_exec.docker_sandbox import DockerSandboxConfig, DockerSandboxPool, connect
from ludic.envs.code_exec.podman_sandbox import PodmanConfig, PodmanHPCSandboxPool

FETCHED = Path(__file__).parents[2] / "target" / "containers"
PROGRAMS = os.pathsep.join([f"{FETCHED}/usr/bin", f"{FETCHED}/usr/sbin", os.environ["PATH"]])
LIBRARIES = os.pathsep.join(map(str, FETCHED.glob("usr/lib/*-linux-gnu*")))
IMAGE = "ludic-test:1"
CGROUP = os.environ.get("LUDIC_TEST_CGROUP", f"ludic-test-{os.getpid()}")
"""The parent of all containers of this process and of those that it starts."""
READY_S = 120


def cgroups():
    """The folders of that parent, one for each controller."""
    return list(Path("/sys/fs/cgroup").glob(f"*/{CGROUP}")) + list(Path("/sys/fs/cgroup").glob(CGROUP))


def in_containers(name):
    """A parameter of tests, of which one process runs all of that name: they share a daemon."""
    return pytest.param(name, marks=[pytest.mark.integration, pytest.mark.xdist_group(f"agents in {name}")])


def find_or_skip(program):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("containers of a test's own need Linux and root: run the tests as root")
    found = shutil.which(program, path=PROGRAMS)
    if found is None:
        pytest.skip(f"no {program}: `make containers` fetches it")
    return found


@contextmanager
def changed_environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def root_folder():
    """A tar file with the links and folders of an image."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if os.path.islink(f"/{name}"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                tar.addfile(entry)
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "workspace"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    return data.getvalue()


def copied_root(programs):
    """A tar file with the root of an image that has these programs of this machine and their
    libraries, and nothing of /usr else."""
    files = {
        f"usr/bin/{name}": os.path.realpath(found) for name in programs if (found := shutil.which(name, path="/usr/bin:/bin"))
    }
    shown = subprocess.run(["ldd", *files.values()], capture_output=True, text=True, check=False).stdout
    for path in re.findall(r"(/lib\S+)", shown):
        if not path.endswith(":"):
            files[f"usr{path}".removeprefix("usr/usr") if path.startswith("/usr") else f"usr{path}"] = os.path.realpath(path)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        folders = {str(parent) for name in files for parent in Path(name).parents if parent.name}
        for name in sorted({*folders, "etc", "tmp", "proc", "sys", "dev", "run"}):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in ("bin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        for name, path in files.items():
            tar.add(path, name)
    return data.getvalue()


def import_image(program, data, name):
    """Give a daemon or a Podman of a test's own an image."""
    subprocess.run([shutil.which(program), "import", "-", name], input=data, check=True, capture_output=True, timeout=READY_S)


@contextmanager
def own_folder(name):
    """A folder below /tmp: the paths of sockets are short. What is mounted in it is unmounted."""
    folder = Path(tempfile.mkdtemp(prefix=f"ludic-{os.getpid()}-{name}-"))
    try:
        yield folder
    finally:
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (mounted := line.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", mounted], check=False)
        remove_folder(folder)
        remove_cgroups()


def remove_folder(folder):
    """Also while Podman's own process, which cleans up after a container, still writes into it."""
    deadline = time.monotonic() + READY_S
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def remove_cgroups():
    """Once their last process has ended. Podman leaves one for its watchers, named conmon."""
    deadline = time.monotonic() + READY_S
    while paths := cgroups():
        try:
            for path in paths:
                for inner in path.glob("conmon"):
                    inner.rmdir()
                path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def docker_daemon():
    """The daemon is the one of the environment, and has the image."""
    program = find_or_skip("dockerd")
    with own_folder("docker") as folder, (folder / "log").open("wb") as log:
        address = f"unix://{folder}/socket"
        command = [
            program,
            "--iptables=false",
            "--bridge=none",
            "--storage-driver=vfs",
            "--host",
            address,
            f"--cgroup-parent=/{CGROUP}",
        ]
        command += ["--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid"]
        daemon = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PATH": PROGRAMS, "LD_LIBRARY_PATH": LIBRARIES},
        )
        try:
            with changed_environment(DOCKER_HOST=address):
                client = wait_for_daemon(daemon, folder)
                client.api.import_image_from_data(root_folder(), *IMAGE.split(":"))
                yield client
                client.close()
        finally:
            daemon.terminate()
            try:
                daemon.wait(READY_S)
            finally:
                kill_group(daemon.pid)


def wait_for_daemon(daemon, folder):
    """A client of the daemon. The pid file's socket is there before it answers."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return connect()
        except RuntimeError:
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((folder / "log").read_text()[-3000:]) from None
            time.sleep(0.05)


def kill_group(leader):
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def own_podman(name="podman"):
    """A `podman` (or `podman-hpc`) on PATH with the image, whose containers are its own."""
    program = find_or_skip("podman")
    with own_folder("podman") as folder:
        settings = folder / "home/.config/containers"
        settings.mkdir(parents=True)
        (settings / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        # crun, the default, refuses mixed cgroups; conmon inherits no variable.
        (settings / "containers.conf").write_text(f"""
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
conmon_path = ["{shutil.which("conmon", path=PROGRAMS)}"]
conmon_env_vars = ["LD_LIBRARY_PATH={LIBRARIES}", "PATH={PROGRAMS}"]
[containers]
netns = "host"
[engine.runtimes]
runc = ["{shutil.which("runc", path=PROGRAMS)}"]
""")
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / name
        options = f"--root {folder}/root --runroot {folder}/run --tmpdir {folder}/tmp --storage-driver vfs"
        wrapper.write_text(f"""#!/bin/sh
export HOME={folder}/home CONTAINERS_CONF={settings}/containers.conf LD_LIBRARY_PATH={LIBRARIES}
cd {folder}  # conmon leaves a file named oom where it started
exec {program} {options} "$@"
""")
        wrapper.chmod(0o755)
        (folder / "image.tar").write_bytes(root_folder())
        subprocess.run([wrapper, "import", folder / "image.tar", IMAGE], check=True, capture_output=True, timeout=READY_S)
        try:
            with changed_environment(PATH=f"{folder / 'bin'}:{os.environ['PATH']}"):
                yield wrapper
        finally:  # also what a test that failed has left
            subprocess.run([wrapper, "rm", "--all", "--force"], check=True, capture_output=True, timeout=READY_S)


def docker_pool(n_workers, **settings):
    usr = {"/usr": {"bind": "/usr", "mode": "ro"}}
    config = DockerSandboxConfig(base_image=IMAGE, cpu_quota=None, create_options={"volumes": usr})
    return DockerSandboxPool(n_workers, config, auto_replace_failed=True, **settings)


def podman_settings(command=None):
    arguments = ["--volume", "/usr:/usr:ro", "--cgroup-parent", f"/{CGROUP}"]
    return {"image": IMAGE, "config": PodmanConfig(extra_args=arguments, command=command)}


def podman_pool(n_workers, **settings):
    return PodmanHPCSandboxPool(n_workers, **podman_settings(), **settings)
