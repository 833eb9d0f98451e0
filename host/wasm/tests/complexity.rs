//! What would keep the compiler busy is refused before it is compiled.

use std::fmt::Write;

use meridian_wasm::complexity::*;
use meridian_wasm::{LoadError, Runtime};
use proptest::prelude::*;
use support::bombs::{core, doubling, times};

use crate::support;

fn load(text: &str) -> Result<(), LoadError> {
    let bytes = wat::parse_str(text).unwrap_or_else(|error| panic!("{error}"));
    Runtime::new(None)?.load(&bytes).map(drop)
}

/// What there is too much of in the component, and the limit.
fn refusal(text: &str) -> (&'static str, u64) {
    match load(text) {
        Err(LoadError::TooComplex { what, found, limit }) => {
            assert!(found > limit, "{what}: {found}, {limit}");
            (what.leak(), limit)
        }
        other => panic!("{other:?}"),
    }
}

/// That a component of one core module passes the limits; it has no world.
fn passes(module: &str) {
    let loaded = load(&core(module));
    assert!(matches!(loaded, Err(LoadError::MissingExport { .. })), "{loaded:?}");
}

#[test]
fn a_refusal_says_what_there_is_too_much_of() {
    let error = load(&core(&times(MAX_FUNCTIONS + 1, "(func)"))).unwrap_err();
    assert_eq!(error.to_string(), "too complex: functions: 40001, expected at most 40000");
}

#[test]
fn counts_of_core_modules_are_bounded() {
    let params = times(MAX_PARAMETERS + 1, " i32");
    let results = times(MAX_RESULTS + 1, " i32");
    let half = times(MAX_FUNCTIONS / 2 + 1, "(func)");
    for (text, what, limit) in [
        (format!("(component {})", times(MAX_CORE_MODULES + 1, "(core module)")), "core modules", MAX_CORE_MODULES),
        (core(&times(MAX_CORE_TYPES + 1, "(type (func))")), "core types", MAX_CORE_TYPES),
        (core(&format!("(type (func (param{params})))")), "parameters of a function", MAX_PARAMETERS),
        (core(&format!("(type (func (result{results})))")), "results of a function", MAX_RESULTS),
        // A sum over modules.
        (format!("(component (core module {half}) (core module {half}))"), "functions", MAX_FUNCTIONS),
        (core(&times(MAX_CORE_IMPORTS + 1, "(import \"a\" \"b\" (func))")), "core imports", MAX_CORE_IMPORTS),
        (core(&times(MAX_GLOBALS + 1, "(global i32 (i32.const 0))")), "globals", MAX_GLOBALS),
        (core(&times(MAX_MEMORIES + 1, "(memory 1)")), "memories", MAX_MEMORIES),
        (core(&times(MAX_TABLES + 1, "(table 1 funcref)")), "tables", MAX_TABLES),
        (
            core(&format!("(table {MAX_INITIAL_ELEMENTS} funcref) (table 1 funcref)")),
            "elements of tables",
            MAX_INITIAL_ELEMENTS,
        ),
        (
            core(&format!("(func) (elem func{})", times(MAX_SEGMENT_ELEMENTS, " 0"))),
            "items of element segments",
            MAX_SEGMENT_ELEMENTS,
        ),
        (core(&times(MAX_DATA_SEGMENTS + 1, "(data \"\")")), "data segments", MAX_DATA_SEGMENTS),
        (core(&format!("(data \"{}\")", times(MAX_DATA_BYTES + 1, "a"))), "bytes of data segments", MAX_DATA_BYTES),
    ] {
        assert_eq!(refusal(&text), (what, limit));
    }
    let exports: String = (0..=MAX_CORE_EXPORTS).fold(String::new(), |mut text, i| {
        let _ = write!(text, "(export \"{i}\" (func 0))");
        text
    });
    assert_eq!(refusal(&core(&format!("(func) {exports}"))), ("core exports", MAX_CORE_EXPORTS));
}

#[test]
fn code_is_bounded_by_function_and_in_all() {
    let nops = |bytes: u64| format!("(func {})", times(bytes, "nop "));
    assert_eq!(refusal(&core(&nops(MAX_FUNCTION_BYTES))), ("bytes of a function", MAX_FUNCTION_BYTES));
    // 19 bytes each: the sum of the squares is not what is too much.
    let small = format!("(func {})", times(862, "v128.const i64x2 0 0 drop "));
    assert_eq!(refusal(&core(&times(1025, &small))), ("bytes of all functions", MAX_CODE_BYTES));
    let large = nops(MAX_FUNCTION_BYTES - 16);
    let (what, limit) = refusal(&core(&large));
    assert_eq!((what, limit), ("sum of squared bytes of the functions", MAX_CODE_WORK));
    passes(&nops(600 << 10));
    let locals = times(MAX_LOCALS + 1, " i32");
    assert_eq!(refusal(&core(&format!("(func (local{locals}))"))), ("locals of a function", MAX_LOCALS));
    // Parameters are locals.
    let locals = times(MAX_LOCALS, " i32");
    let with_parameter = format!("(func (param i32) (local{locals}))");
    assert_eq!(refusal(&core(&with_parameter)), ("locals of a function", MAX_LOCALS));
}

#[test]
fn what_makes_register_allocation_quadratic_is_bounded() {
    let what = ("branches x locals of a function", MAX_CARRIED_VALUES);
    let locals = times(450, " i32");
    // Small on disk: 450 values change on one of many paths to many places.
    let blocks = format!("{}{}{}", times(1400, "block "), times(1400, "i32.const 0 br_if 0 "), times(1400, "end "));
    assert_eq!(refusal(&core(&format!("(func (local{locals}) {blocks})"))), what);
    let table = format!("(func (local{locals}) local.get 0 br_table{} 0)", times(3000, " 0"));
    assert_eq!(refusal(&core(&table)), what);
    let calls = times(70_000, "i32.const 0 call_indirect ");
    assert_eq!(refusal(&core(&format!("(table 1 funcref) (func {calls})"))), what);
    // As much and more, spread over functions.
    let what = ("sum of squared branches x locals of the functions", MAX_BRANCH_WORK);
    let blocks = format!("{}{}{}", times(700, "block "), times(700, "i32.const 0 br_if 0 "), times(700, "end "));
    assert_eq!(refusal(&core(&times(4, &format!("(func (local{locals}) {blocks})")))), what);
}

#[test]
fn loops_inside_each_other_are_bounded() {
    let nested = |depth: u64| format!("(func {}{})", times(depth, "loop "), times(depth, "end "));
    assert_eq!(refusal(&core(&nested(MAX_LOOP_DEPTH + 1))), ("loops inside each other", MAX_LOOP_DEPTH));
    passes(&nested(MAX_LOOP_DEPTH));
    // Side by side they do not add up, and blocks are no loops.
    passes(&format!("(func {})", times(100, "loop end ")));
    passes(&format!("(func {}{})", times(100, "block "), times(100, "end ")));
}

#[test]
fn vector_operators_are_read_over() {
    passes(
        "(memory 1) (func (param v128 i32) (result v128)
           local.get 1 v128.load offset=5
           local.get 0 i8x16.shuffle 0 31 2 3 4 5 6 7 8 9 10 11 12 13 14 15
           v128.const i64x2 0x0b0b0b0b0b0b0b0b 2 i32x4.add
           local.set 0
           local.get 1 local.get 0 v128.load8_lane 3
           i8x16.extract_lane_u 2 i32x4.splat
           local.get 0 i32x4.add
           block local.get 1 br_if 0 end)",
    );
}

#[test]
fn instantiating_again_and_again_is_bounded() {
    let what = ("items of a component as it is instantiated", MAX_COMPONENT_ITEMS);
    // Each component instantiates the one before twice: 2^40 instances in two kilobytes.
    assert_eq!(refusal(&doubling(40)), what);
    // To hand a component over as an argument hides what is instantiated.
    let handed = r#"(component (component (import "a" (component $a)) (instance (instantiate $a)) (instance (instantiate $a))))"#;
    assert_eq!(refusal(handed), ("types of components", 0));
    let hidden = r#"(component (import "a" (instance (export "b" (component)))))"#;
    assert_eq!(refusal(hidden), ("types of components", 0));
    let nested = format!("{}{}", times(9, "(component "), times(9, ")"));
    assert_eq!(refusal(&nested), ("nested components and modules", MAX_NESTING));
}

/// A component of one section with these bytes.
fn of_section(id: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = b"\0asm\x0d\0\x01\0".to_vec();
    bytes.push(id);
    let mut length = content.len();
    while length > 0x7f {
        bytes.push(length as u8 | 0x80);
        length >>= 7;
    }
    bytes.push(length as u8);
    bytes.extend(content);
    bytes
}

/// Load on a thread whose stack is too small for anything that recurses.
fn load_on_small_stack(bytes: Vec<u8>) -> LoadError {
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let load = move || runtime.load(&bytes).err().expect("the bytes must be refused");
    let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(load).expect("a thread starts");
    thread.join().expect("it does not panic")
}

#[test]
fn types_inside_each_other_are_bounded() {
    const SECTION_OF_CORE_TYPES: u8 = 3;
    const SECTION_OF_A_COMPONENT: u8 = 4;
    const SECTION_OF_TYPES: u8 = 7;
    // One type: `opener` so many times, and the innermost.
    let nested = |count: u64, opener: &[u8], innermost: &[u8]| -> Vec<u8> {
        [&[1], opener.repeat(usize::try_from(count).unwrap()).as_slice(), innermost].concat()
    };
    // An instance type with one declaration, a type.
    let instances = |count| of_section(SECTION_OF_TYPES, &nested(count, &[0x42, 1, 1], &[0x42, 0]));
    for count in [MAX_TYPE_NESTING, 4_000, 5_000, 100_000] {
        for bytes in [instances(count), of_section(SECTION_OF_A_COMPONENT, &instances(count))] {
            let refused = load_on_small_stack(bytes).to_string();
            assert_eq!(refused, "too complex: types inside each other: 33, expected at most 32");
        }
    }
    let within = load_on_small_stack(instances(MAX_TYPE_NESTING - 1));
    assert!(matches!(within, LoadError::MissingExport { .. }), "{within}");
    let components = of_section(SECTION_OF_TYPES, &nested(100_000, &[0x41, 1, 1], &[0x41, 0]));
    assert_eq!(load_on_small_stack(components).to_string(), "too complex: types of components: 1, expected at most 0");
    // An instance type that declares component types, and the other way round.
    let mixed = of_section(SECTION_OF_TYPES, &nested(100_000, &[0x42, 1, 1, 0x41, 1, 1], &[0x41, 0]));
    assert_eq!(load_on_small_stack(mixed).to_string(), "too complex: types of components: 1, expected at most 0");
    // Types of modules and recursion groups have no place for another one.
    for opener in [[0x50, 1, 1], [0x4e, 1, 1], [0x4e, 1, 0x4e]] {
        let core = nested(100_000, &opener, &[0x50, 0]);
        let in_instance = [&[1, 0x42, 1, 0], &core[1..]].concat();
        for bytes in [of_section(SECTION_OF_CORE_TYPES, &core), of_section(SECTION_OF_TYPES, &in_instance)] {
            let refused = load_on_small_stack(bytes);
            assert!(matches!(refused, LoadError::Invalid { .. }), "{refused}");
        }
    }
}

/// A function that takes the last of a chain of types, each an option of the one before.
fn chain(count: u64) -> String {
    let types = (1..count).fold(String::from("(type (option u8))"), |mut text, i| {
        let _ = write!(text, "(type (option {}))", i - 1);
        text
    });
    format!(
        r#"(component {types} (type $f (func (param "a" {})))
             (core module $m (memory (export "m") 1) (func (export "f") (param i32))
               (func (export "r") (param i32 i32 i32 i32) (result i32) unreachable))
             (core instance $i (instantiate $m))
             (func (type $f) (canon lift (core func $i "f") (memory (core memory $i "m")) (realloc (core func $i "r")))))"#,
        count - 1
    )
}

#[test]
fn chains_of_types_do_not_crash() {
    // The validator's own limit: it names types by number, so that nothing is inside anything here.
    let refused = load(&chain(MAX_COMPONENT_ITEMS - 10)).unwrap_err();
    assert!(refused.to_string().contains("type nesting is too deep"), "{refused}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), at in any::<usize>(), byte in any::<u8>()) {
        let runtime = Runtime::new(None).unwrap();
        prop_assert!(runtime.load(&bytes).is_err());
        // After a header there is more to get wrong.
        let headed = [b"\0asm\x0d\0\x01\0".as_slice(), &bytes].concat();
        prop_assert!(runtime.load(&headed).is_err());
        let mut altered = support::HOSTILE[0].component();
        let at = at % altered.len();
        altered[at] = byte;
        let _ = runtime.load(&altered);
    }
}
