//! Compiles `src/main.rs` for the library to include: static, so that it runs in any image.
use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=src/main.rs");
    let read = |name: &str| env::var(name).unwrap_or_default();
    let program = Path::new(&read("OUT_DIR")).join("relay");
    if read("CARGO_CFG_TARGET_OS") != "linux" {
        fs::write(&program, "").expect("OUT_DIR can be written");
        return;
    }
    let compile = |linking: &str| {
        let mut rustc = Command::new(read("RUSTC"));
        rustc.args(["src/main.rs", "--crate-name=relay", "--edition=2024", "--target", &read("TARGET")]);
        rustc.args(["-Copt-level=s", "-Clto=fat", "-Cpanic=abort", "-Cstrip=symbols", linking, "-o"]).arg(&program);
        if let Ok(linker) = env::var("RUSTC_LINKER") {
            rustc.arg(format!("-Clinker={linker}"));
        }
        rustc.output().expect("rustc can be started")
    };
    if compile("-Ctarget-feature=+crt-static").status.success() {
        return;
    }
    println!("cargo:warning=no static C library (glibc-static, libc6-dev): sandboxes need this machine's C library");
    let compiled = compile("-Ctarget-feature=-crt-static");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
