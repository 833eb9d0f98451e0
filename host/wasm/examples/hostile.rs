//! Writes the hostile components into a folder, for tests that run them inside the real engine. Those that go wrong in
//! `decide` are listed with the fault they cause; `init-trap` and `init-loop` never start, `rank` and `probe` fill the other
//! slots and behave, `snapshot-trap` and `restore-trap` go wrong when their state is handed over and `eight-bytes` does not,
//! `trap-later` goes wrong from the first second on.
//!
//!     cargo build --release --workspace --examples && target/release/examples/hostile target/hostile

#[path = "../tests/support/mod.rs"]
mod support;

fn main() {
    let folder = std::env::args().nth(1).expect("usage: hostile FOLDER");
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    for hostile in support::HOSTILE {
        let path = format!("{folder}/{}.wasm", hostile.name);
        std::fs::write(&path, hostile.component()).expect("the file can be written");
        println!("{} {}", hostile.name, hostile.fault.unwrap_or("none"));
    }
    let list = "(call $list (i32.const 4096) (local.get $candidates))";
    let none = "(call $list (i32.const 4096) (i32.const 0))";
    for (name, world, body, text) in
        [("rank", "eviction-policy", &support::RANK, list), ("probe", "budget-policy", &support::PROBE, none)]
    {
        std::fs::write(format!("{folder}/{name}.wasm"), support::filling(world, body, text))
            .expect("the file can be written");
    }
    for (name, init) in [("init-trap", "unreachable"), ("init-loop", "(loop $l (br $l))")] {
        std::fs::write(format!("{folder}/{name}.wasm"), support::with_init(init)).expect("the file can be written");
    }
    for (name, component) in [
        ("snapshot-trap", support::with_state("unreachable", "(i32.const 256)")),
        ("restore-trap", support::with_state(support::EIGHT_BYTES, "unreachable")),
        ("eight-bytes", support::with_state(support::EIGHT_BYTES, "(i32.const 256)")),
        ("trap-later", support::component(&support::module("", support::TRAPS_LATER))),
    ] {
        std::fs::write(format!("{folder}/{name}.wasm"), component).expect("the file can be written");
    }
}
