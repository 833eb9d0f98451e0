//! What the machine refuses is no fault of a policy.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "seccomp is a call of Linux that the standard library lacks")]

use std::thread;

use meridian_core::{Batch, Decision, MeridianConfig, Policy, Step};
use meridian_wasm::{LoadError, Runtime, WasmPolicy};
use support::LIMITS;

use crate::support;

/// Have this thread, and those that it starts, refused a call of Linux with `EBUSY`: one of any arguments, or one whose second
/// argument is this.
fn refuse(call: libc::c_long, argument: Option<libc::c_int>) {
    let of = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equals, answer) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ, libc::BPF_RET);
    let mut program = vec![of(load, 0, 0, 0), of(equals, 0, if argument.is_some() { 3 } else { 1 }, call as u32)];
    if let Some(argument) = argument {
        // `seccomp_data.args[1]`
        program.extend([of(load, 0, 0, 24), of(equals, 0, 1, argument as u32)]);
    }
    program.push(of(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EBUSY as u32));
    program.push(of(answer, 0, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the first call takes numbers; the second reads `filter` and the program that it points to, and both outlive it.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter) == 0
    };
    assert!(refused, "{}", std::io::Error::last_os_error());
}

/// A policy whose memory begins with contents, which an instance takes from an image of it.
fn started() -> Result<WasmPolicy, LoadError> {
    let decide = "(call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))";
    let memory = r#"(memory (export "memory") 32)"#;
    let text =
        support::module("", decide).replacen(memory, &format!(r#"{memory} (data (i32.const 2048) "contents")"#), 1);
    let component = Runtime::new(None)?.load(&support::component(&text))?;
    component.dispatch_policy(LIMITS, MeridianConfig::default().scheduler.targets(), "{}")
}

#[test]
fn a_component_loads_where_linux_refuses_to_seal_a_file_in_memory() {
    let decided = thread::spawn(|| {
        refuse(libc::SYS_fcntl, Some(libc::F_ADD_SEALS));
        let mut decision = Decision::default();
        let batch = Batch { facts: &Step::default(), candidates: 2, columns: &[], finished: &[] };
        started().unwrap().decide(&batch, &mut decision).unwrap();
        decision.keys.len()
    });
    assert_eq!(decided.join().unwrap(), 2);
}

#[test]
fn what_the_machine_refuses_names_the_machine() {
    let refused = thread::spawn(|| {
        refuse(libc::SYS_memfd_create, None);
        started().err().unwrap()
    });
    let refused = refused.join().unwrap();
    assert!(matches!(&refused, LoadError::Setup { detail } if detail.starts_with("no instance: ")), "{refused}");
}
