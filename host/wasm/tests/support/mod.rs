//! Hostile components, written as core WebAssembly text and wrapped by wit-component.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod bombs;
pub mod bulk;

use std::time::Duration;

use meridian_wasm::PolicyLimits;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// A deadline that no decision misses that ends, however busy the machine.
pub const LIMITS: PolicyLimits = PolicyLimits::UNHURRIED;
/// For a component that never answers.
pub const SHORT_LIMITS: PolicyLimits = PolicyLimits { deadline: Duration::from_millis(2), ..LIMITS };

/// A component that goes wrong in one way.
pub struct Hostile {
    /// File name without extension.
    pub name: &'static str,
    /// The label of the fault it causes; `None` when its answer is odd but valid.
    pub fault: Option<&'static str>,
    decide: &'static str,
}

const fn hostile(name: &'static str, fault: Option<&'static str>, decide: &'static str) -> Hostile {
    Hostile { name, fault, decide }
}

/// Every way to go wrong in `decide`. The body may use `$candidates`, `$calls` (1 at the first call), `$recurse`, and
/// `$answer` with a pointer and a length of keys and the tag and value of the token budget.
pub const HOSTILE: &[Hostile] = &[
    hostile("trap", Some("trap"), "unreachable"),
    hostile("endless-loop", Some("deadline"), "(loop $l (br $l)) unreachable"),
    hostile(
        "memory-growth",
        Some("memory"),
        "(loop $l (br_if $l (i32.ge_s (memory.grow (i32.const 64)) (i32.const 0)))) unreachable",
    ),
    hostile("deep-recursion", Some("trap"), "(call $recurse (i32.const 1))"),
    hostile(
        "wrong-length",
        Some("bad-answer"),
        "(call $answer (i32.const 4096) (i32.add (local.get $candidates) (i32.const 1)) (i32.const 0) (i32.const 0))",
    ),
    hostile(
        "nan-keys",
        None,
        "(i64.store (i32.const 4096) (i64.const 0x7f8000007fc00000))
         (i64.store (i32.const 4104) (i64.const 0xff8000007fc00001))
         (call $answer (i32.const 4096) (local.get $candidates) (i32.const 1) (i32.const 0))",
    ),
    hostile(
        "caps-of-nothing",
        None,
        "(i32.store (i32.const 528) (i32.const 4096))
         (i32.store (i32.const 532) (local.get $candidates))
         (call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))",
    ),
    hostile(
        "list-out-of-bounds",
        Some("bad-answer"),
        "(call $answer (i32.const 4096) (i32.const 0x3fffffff) (i32.const 0) (i32.const 0))",
    ),
    hostile(
        "huge-list",
        Some("bad-answer"),
        "(drop (memory.grow (i32.const 900)))
         (call $answer (i32.const 0) (i32.const 14000000) (i32.const 0) (i32.const 0))",
    ),
    hostile(
        "misaligned-list",
        Some("bad-answer"),
        "(call $answer (i32.const 4097) (local.get $candidates) (i32.const 0) (i32.const 0))",
    ),
    hostile(
        "bad-discriminant",
        Some("bad-answer"),
        "(call $answer (i32.const 4096) (local.get $candidates) (i32.const 7) (i32.const 0))",
    ),
    hostile("wild-pointer", Some("bad-answer"), "(i32.const -8)"),
    hostile(
        "trap-on-third-call",
        Some("trap"),
        "(if (i32.eq (global.get $calls) (i32.const 3)) (then unreachable))
         (call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))",
    ),
];

impl Hostile {
    /// The component's bytes.
    pub fn component(&self) -> Vec<u8> {
        component(&module("", self.decide))
    }
}

/// A component that behaves in `decide` and runs `init` when it is initialised.
pub fn with_init(init: &str) -> Vec<u8> {
    component(&module(init, "(call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))"))
}

/// A component that decides, and runs `snapshot` and `restore` when its state is handed over. They return a pointer to a
/// list of bytes, and to a result.
pub fn with_state(snapshot: &str, restore: &str) -> Vec<u8> {
    let text = module("", "(call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))");
    let replaced = |text: &str, signature: &str, body: &str| {
        let old = format!("{signature} (i32.const 256))");
        assert!(text.contains(&old), "{old} is in the module");
        text.replacen(&old, &format!("{signature} {body})"), 1)
    };
    let text = replaced(&text, "#snapshot\") (result i32)", snapshot);
    component(&replaced(&text, "#restore\") (param i32 i32) (result i32)", restore))
}

/// A component that reads the column `request`, and whose keys are the number of requests that it was told have ended.
pub fn counting_ended() -> Vec<u8> {
    let text = module(
        "",
        "(local.set $at (i32.const 0))
    (block (loop
      (br_if 1 (i32.ge_u (local.get $at) (local.get $candidates)))
      (f32.store (i32.add (i32.const 4096) (i32.mul (local.get $at) (i32.const 4))) (f32.convert_i32_u (global.get $ended)))
      (local.set $at (i32.add (local.get $at) (i32.const 1)))
      (br 0)))
    (call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))",
    );
    let mut replaced = text;
    for (old, new) in [
        ("(global $calls", "(global $ended (mut i32) (i32.const 0))\n  (global $calls"),
        (
            "#finished\") (param i32 i32))",
            "#finished\") (param i32 i32) (global.set $ended (i32.add (global.get $ended) (local.get 1))))",
        ),
        (
            "dispatch@1.0.0-rc#inputs\") (result i32) (i32.const 256))",
            "dispatch@1.0.0-rc#inputs\") (result i32) (i32.store (i32.const 600) (i32.const 700))
    (i32.store (i32.const 604) (i32.const 1)) (i32.store8 (i32.const 700) (i32.const 19)) (i32.const 600))",
        ),
        (
            "(param $length i32) (result i32)\n    (global.set",
            "(param $length i32) (result i32) (local $at i32)\n    (global.set",
        ),
    ] {
        assert!(replaced.contains(old), "{old} is in the module");
        replaced = replaced.replacen(old, new, 1);
    }
    component(&replaced)
}

/// Body of a `snapshot` of eight bytes.
pub const EIGHT_BYTES: &str =
    "(i32.store (i32.const 512) (i32.const 4096)) (i32.store (i32.const 516) (i32.const 8)) (i32.const 512)";

/// Body of a `decide` that goes wrong from the first second on: trials are before it.
pub const TRAPS_LATER: &str = "(if (f64.gt (local.get 0) (f64.const 1000)) (then unreachable))
    (call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))";

/// The body of a slot's function in [`filling`]. It may use `$candidates`, `$recurse`, and `$list` with a pointer and a
/// length, which answers with that list.
pub struct Body {
    /// Name and parameters of the function.
    pub export: &'static str,
    /// Loads `$candidates`.
    prologue: &'static str,
}

/// `eviction.rank`.
pub const RANK: Body = Body {
    export: r#"(export "meridian:policy/eviction@1.0.0-rc#rank") (param f64 i32 i32 i32 i32) (param $count i32) (param i32 i32)"#,
    prologue: "(local.set $candidates (local.get $count))",
};

/// `budget.probe`; its parameters are too many to be passed one by one, so they lie in memory.
pub const PROBE: Body = Body {
    export: r#"(export "meridian:policy/budget@1.0.0-rc#probe") (param $arguments i32)"#,
    prologue: "(local.set $candidates (i32.load offset=88 (local.get $arguments)))",
};

/// A component of world `world` that runs `body` when it is asked.
pub fn filling(world: &str, body: &Body, text: &str) -> Vec<u8> {
    let Body { export, prologue } = body;
    let module = module("", "unreachable");
    let (common, _) =
        module.split_once("  (func (export \"meridian:policy/dispatch@1.0.0-rc#inputs\")").expect("as below");
    let inputs = if world == "eviction-policy" { "eviction" } else { "budget" };
    let start = if inputs == "budget" {
        r#"(func (export "meridian:policy/budget@1.0.0-rc#start") (param i32) (result i32) (i32.const 256))"#
    } else {
        ""
    };
    component_of(
        world,
        &format!(
            r#"{common}
  (func $list (param $pointer i32) (param $length i32) (result i32)
    (i32.store (i32.const 512) (local.get $pointer))
    (i32.store (i32.const 516) (local.get $length))
    (i32.const 512))
  (func (export "meridian:policy/{inputs}@1.0.0-rc#inputs") (result i32) (i32.const 256))
  {start}
  (func {export} (result i32) (local $candidates i32)
    {prologue}
    {text}))"#
        ),
    )
}

/// The core module with these bodies. Addresses below 1024 hold answers, keys are at 4096, the heap is at 65536.
pub fn module(init: &str, decide: &str) -> String {
    let step = "f64 i32 i32 i32 i32 i32 i32 i32 i32 f32 f32 f32 i64";
    format!(
        r#"(module
  (memory (export "memory") 32)
  (global $calls (mut i32) (i32.const 0))
  (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) (i32.const 65536))
  (func $recurse (param i32) (result i32)
    (i32.add (call $recurse (i32.add (local.get 0) (i32.const 1))) (local.get 0)))
  (func $answer (param $keys i32) (param $length i32) (param $tag i32) (param $budget i32) (result i32)
    (i32.store (i32.const 512) (local.get $keys))
    (i32.store (i32.const 516) (local.get $length))
    (i32.store8 (i32.const 520) (local.get $tag))
    (i32.store (i32.const 524) (local.get $budget))
    (i32.const 512))
  (func (export "meridian:policy/lifecycle@1.0.0-rc#describe") (result i32) (i32.const 256))
  (func (export "meridian:policy/lifecycle@1.0.0-rc#init") (param i32 f32 f32 f32 f32 i32 i32) (result i32)
    {init}
    (i32.const 256))
  (func (export "meridian:policy/lifecycle@1.0.0-rc#finished") (param i32 i32))
  (func (export "meridian:policy/lifecycle@1.0.0-rc#snapshot") (result i32) (i32.const 256))
  (func (export "meridian:policy/lifecycle@1.0.0-rc#restore") (param i32 i32) (result i32) (i32.const 256))
  (func (export "meridian:policy/dispatch@1.0.0-rc#inputs") (result i32) (i32.const 256))
  (func (export "meridian:policy/dispatch@1.0.0-rc#decide")
    (param {step}) (param $candidates i32) (param $columns i32) (param $length i32) (result i32)
    (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
    {decide}))"#
    )
}

/// Wrap a core module as a component of world `dispatch-policy`.
pub fn component(module: &str) -> Vec<u8> {
    component_of("dispatch-policy", module)
}

/// Wrap a core module as a component of a world.
pub fn component_of(world: &str, module: &str) -> Vec<u8> {
    let wit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");
    let mut core = wat::parse_str(module).unwrap_or_else(|error| panic!("{error}"));
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(wit).expect("the WIT package parses");
    let world = resolve.select_world(&[package], Some(world)).expect("the package has the world");
    embed_component_metadata(&mut core, &resolve, world, StringEncoding::UTF8).expect("metadata embeds");
    ComponentEncoder::default()
        .module(&core)
        .and_then(|encoder| encoder.validate(true).encode())
        .unwrap_or_else(|error| panic!("{error:#}"))
}
