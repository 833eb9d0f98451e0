//! Components that cost a compiler as much as the limits allow, and a little more. They fill no slot: one that compiles is
//! refused for its missing exports.

use std::fmt::Write;

use meridian_wasm::complexity::*;

/// A component that is just within the limits, or just beyond one.
pub struct Bomb {
    /// What there is much of.
    pub name: &'static str,
    /// The survey lets it pass.
    pub is_within: bool,
    /// The component.
    pub bytes: Vec<u8>,
}

/// A component of one core module.
pub fn core(fields: &str) -> String {
    format!("(component (core module {fields}))")
}

/// The text so many times.
pub fn times(count: u64, text: &str) -> String {
    text.repeat(usize::try_from(count).expect("a count fits"))
}

/// Every kind twice, within the limits and beyond.
pub fn bombs() -> Vec<Bomb> {
    let mut bombs = Vec::new();
    let mut pair = |name, within: String, beyond: String| {
        for (is_within, text) in [(true, within), (false, beyond)] {
            let bytes = wat::parse_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
            bombs.push(Bomb { name, is_within, bytes });
        }
    };
    let exits = MAX_CARRIED_VALUES / (LOCALS + 1 + FIXED);
    pair("early exits", core(&early_exits(exits - 2)), core(&early_exits(exits + 2)));
    pair("blocks that carry locals", core(&carrying_blocks(exits / 2 - 2)), core(&carrying_blocks(exits / 2 + 2)));
    pair("two functions of the worst kind", core(&times(2, &worst())), core(&times(3, &worst())));
    pair("targets of a branch table", core(&table(exits / 2 - 2)), core(&table(exits / 2 + 2)));
    pair("loops inside each other", core(&loops(MAX_LOOP_DEPTH)), core(&loops(MAX_LOOP_DEPTH + 1)));
    pair("blocks inside each other", core(&nested(MAX_CARRIED_VALUES / FIXED - 9)), core(&nested(210_000)));
    pair("values alive at once", core(&values(84_000)), core(&values(110_000)));
    pair("straight code", core(&straight(78_000)), core(&straight(110_000)));
    let calls = MAX_CARRIED_VALUES / (1 + FIXED) / 8;
    pair("indirect calls", core(&indirect(calls - 1)), core(&indirect(calls + 1)));
    pair("functions", core(&times(MAX_FUNCTIONS, "(func)")), core(&times(MAX_FUNCTIONS + 1, "(func)")));
    pair("types", core(&types(MAX_CORE_TYPES)), core(&types(MAX_CORE_TYPES + 1)));
    pair("exports", core(&exports(MAX_CORE_EXPORTS)), core(&exports(MAX_CORE_EXPORTS + 1)));
    pair("elements", core(&elements(MAX_SEGMENT_ELEMENTS - 5)), core(&elements(MAX_SEGMENT_ELEMENTS)));
    pair("data segments", core(&segments(MAX_DATA_SEGMENTS)), core(&segments(MAX_DATA_SEGMENTS + 1)));
    pair("bytes of data", core(&data(MAX_DATA_BYTES)), core(&data(MAX_DATA_BYTES + 1)));
    pair("instances of instances", doubling(12), doubling(40));
    bombs
}

/// Locals of a function beside its parameter.
const LOCALS: u64 = 450;
/// What a function body's fixed values add to its locals.
const FIXED: u64 = 4;

/// A function of one parameter and [`LOCALS`] locals; each may change in the body, and all are used behind it.
fn function(body: &str) -> String {
    let all = (1..=LOCALS).fold(String::from("local.get 0"), |mut text, local| {
        let _ = write!(text, " local.get {local} i32.add");
        text
    });
    format!("(func (param i32) (result i32) (local{}) {body} {all})", times(LOCALS, " i32"))
}

/// Changes one local, each its own in turn, and leaves its value.
fn change(turn: u64) -> String {
    let local = turn % LOCALS + 1;
    format!("local.get {local} local.get 0 i32.add local.tee {local} ")
}

fn changes(count: u64, after_each: &str) -> String {
    (0..count).fold(String::new(), |text, turn| text + &change(turn) + after_each)
}

/// A way out of a block, each with other values in the locals.
fn exit(turn: u64, label: u64) -> String {
    format!("local.get 0 br_if {label} i32.const {turn} local.set {} ", turn % LOCALS + 1)
}

fn early_exits(count: u64) -> String {
    let exits: String = (0..count - 1).map(|turn| exit(turn, 0)).collect();
    function(&format!("block {exits} end"))
}

fn carrying_blocks(count: u64) -> String {
    let exits: String = (0..count).map(|turn| exit(turn, turn)).collect();
    function(&format!("{}{exits}{}", times(count, "block "), times(count, "end ")))
}

fn worst() -> String {
    carrying_blocks(MAX_CARRIED_VALUES / (LOCALS + 1 + FIXED) / 2 - 2)
}

fn table(targets: u64) -> String {
    let labels = (0..targets).fold(String::new(), |text, label| format!("{text} {label}"));
    let arms = changes(targets, "drop end ");
    function(&format!("{}local.get 0 br_table{labels} 0 end {arms}", times(targets + 1, "block ")))
}

fn loops(depth: u64) -> String {
    let inner = changes(LOCALS, "drop ");
    let ends = changes(depth, "br_if 0 end ");
    function(&format!("{}{inner}{ends}", times(depth, "loop ")))
}

fn nested(depth: u64) -> String {
    format!("(func {}{})", times(depth, "block "), times(depth, "end "))
}

fn values(count: u64) -> String {
    let loads = (0..count).fold(String::new(), |mut text, i| {
        let _ = write!(text, "i32.const {} i32.load ", i % 8_000);
        text
    });
    format!("(memory 1) (func (result i32) {loads}{})", times(count - 1, "i32.add "))
}

fn straight(count: u64) -> String {
    format!(
        "(func (param i32) (result i32) {} local.get 0)",
        times(count, "local.get 0 i32.const 77 i32.mul local.set 0 ")
    )
}

fn indirect(count: u64) -> String {
    format!("(table 1 funcref) (func (param i32) {})", times(count, "i32.const 0 call_indirect "))
}

/// All different.
fn types(count: u64) -> String {
    (0..count).fold(String::new(), |mut text, number| {
        let parameters: String = (0..13).map(|bit| if (number >> bit) & 1 == 0 { " i32" } else { " i64" }).collect();
        let _ = write!(text, "(type (func (param{parameters})))");
        text
    })
}

fn exports(count: u64) -> String {
    (0..count).fold(String::from("(func)"), |mut text, number| {
        let _ = write!(text, "(export \"{number}\" (func 0))");
        text
    })
}

/// In five segments.
fn elements(count: u64) -> String {
    let segment = format!("(elem (i32.const 0) func{})", times(count / 5, " 0"));
    format!("(func) (table {MAX_INITIAL_ELEMENTS} funcref) {}", times(5, &segment))
}

fn segments(count: u64) -> String {
    (0..count).fold(String::from("(memory 1)"), |mut text, number| {
        let _ = write!(text, "(data (i32.const {number}) \"a\")");
        text
    })
}

fn data(bytes: u64) -> String {
    format!("(memory 400) (data (i32.const 0) \"{}\")", times(bytes, "a"))
}

/// Components that each instantiate the one before twice.
pub fn doubling(depth: u64) -> String {
    let mut text = String::from("(component $c0 (core module $m) (core instance (instantiate $m)))");
    for i in 1..depth {
        let before = i - 1;
        let _ = write!(
            text,
            "(component $c{i} (alias outer 1 $c{before} (component $x)) (instance (instantiate $x))
               (instance (instantiate $x)))"
        );
    }
    format!("(component {text} (instance (instantiate $c{})))", depth - 1)
}
