//! Components: any bytes, and edits of components that work. They load and decide, or are refused in one line; what they
//! do while they run is a fault.

use std::ops::Range;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use meridian_core::{Asked, Batch, Budget, Description, Dispatch, Eviction, GuardedPolicy, MeridianConfig, SlotName};
use meridian_engine::{Components, Origin, PolicyError, Terms};
use meridian_wasm::{GuestKind, LoadError, PolicyLimits};
use wasmparser::{Parser, Payload};

use crate::bytes::Bytes;

/// An input that begins with this is a list of edits, the first of which says of which base.
pub const EDITS: &[u8] = b"EDIT";

/// Components that decide; `target/release/examples/hostile host/fuzz/corpus/component` writes them anew.
pub const BASES: [&[u8]; 2] = [
    include_bytes!("../corpus/component/nan-keys.wasm"),
    include_bytes!("../corpus/component/trap-on-third-call.wasm"),
];

const MAX_EDITS: usize = 64;
/// Values on which lengths, pointers and discriminants turn.
const NUMBERS: [i32; 12] = [0, 1, 2, 3, 7, 8, 255, 256, 4096, 65_535, i32::MAX, -1];

/// Load `data`, or the edited base, and have it decide.
pub fn run(data: &[u8]) {
    match data.strip_prefix(EDITS) {
        Some(edits) => load(&edited(edits)),
        None => load(data),
    }
}

fn load(bytes: &[u8]) {
    static COMPONENTS: LazyLock<Components> = LazyLock::new(Components::default);
    match COMPONENTS.bytes(bytes, None, "fuzz") {
        Ok(origin) => origin.slots().expect("a component").into_iter().for_each(|slot| match slot {
            SlotName::Dispatch => fill::<Dispatch>(&origin),
            SlotName::Eviction => fill::<Eviction>(&origin),
            SlotName::Budget => fill::<Budget>(&origin),
        }),
        // Otherwise every input would pass.
        Err(PolicyError::Component { error: LoadError::Setup { detail }, .. }) => {
            panic!("no WebAssembly here: {detail}")
        }
        Err(error) => assert_told(&error.to_string()),
    }
}

/// Have it fill slot `K`: start, some decisions, a snapshot.
fn fill<K: GuestKind>(origin: &Origin) {
    let limits = PolicyLimits { deadline: Duration::from_millis(1), memory_bytes: 4 << 20, ..PolicyLimits::default() };
    let targets = MeridianConfig::default().scheduler.targets();
    let policy = match origin.policy::<K>(Terms { limits, targets }, "{}") {
        Ok(policy) => policy,
        Err(error) => return assert_told(&error.to_string()),
    };
    let mut policy = GuardedPolicy::<K>::new(policy);
    let Description { name, version, summary } = policy.policy().description();
    for text in [name, version, summary] {
        assert!(text.len() <= 4 * 512 && !text.chars().any(char::is_control), "{text:?}");
    }
    let mut decision = K::Decision::default();
    for candidates in [0, 1, 4, 4] {
        let columns = vec![1.0; candidates * policy.policy().inputs().len()];
        for facts in K::trials(candidates as u32) {
            let asked =
                policy.ask(&Batch { facts: &facts, candidates, columns: &columns, finished: &[] }, &mut decision);
            if let Asked::Faulted(faults) = asked {
                faults.iter().for_each(|fault| assert_told(&fault.to_string()));
            }
        }
    }
    match policy.policy_mut().snapshot() {
        Ok(state) => {
            if let Err(fault) = policy.policy_mut().restore(&state) {
                assert_told(&fault.to_string());
            }
        }
        Err(fault) => assert_told(&fault.to_string()),
    }
}

/// In one line, and no more of it than an operator reads.
fn assert_told(text: &str) {
    crate::assert_one_line(text);
    assert!(text.len() <= 8192, "an error of {} bytes", text.len());
}

/// What can be edited of a base so that the result is still read far.
struct Map {
    /// Each instruction of its functions.
    operators: Vec<Range<usize>>,
    /// Contents of its sections, those of nested modules included.
    sections: Vec<Range<usize>>,
}

impl Map {
    fn of(component: &[u8]) -> Self {
        let (mut operators, mut sections) = (Vec::new(), Vec::new());
        for payload in Parser::new(0).parse_all(component) {
            let payload = payload.expect("a base is valid");
            if let Some((_, range)) = payload.as_section() {
                sections.push(range);
            }
            let Payload::CodeSectionEntry(body) = payload else { continue };
            let reader = body.get_operators_reader().expect("a base is valid");
            let mut starts: Vec<usize> =
                reader.into_iter_with_offsets().map(|found| found.expect("a base is valid").1).collect();
            starts.push(body.range().end);
            operators.extend(starts.windows(2).map(|pair| pair[0]..pair[1]));
        }
        Self { operators, sections }
    }
}

/// The base that the first byte says, with edits of five bytes each.
fn edited(edits: &[u8]) -> Vec<u8> {
    static MAPS: OnceLock<Vec<Map>> = OnceLock::new();
    let maps = MAPS.get_or_init(|| BASES.iter().map(|base| Map::of(base)).collect());
    let mut edits = Bytes::new(edits);
    let chosen = usize::from(edits.u8()) % BASES.len();
    let (mut bytes, map) = (BASES[chosen].to_vec(), &maps[chosen]);
    for _ in 0..MAX_EDITS {
        if edits.is_empty() {
            break;
        }
        let (kind, place, value) = (edits.u8(), usize::from(edits.u16()), edits.u16());
        let operator = map.operators[place % map.operators.len()].clone();
        let section = map.sections[place % map.sections.len()].clone();
        match kind % 8 {
            // Any byte of the file.
            0 => {
                let place = place % bytes.len();
                bytes[place] = value as u8;
            }
            // A byte of a section: names, types, exports, data.
            1 if !section.is_empty() => {
                let place = section.start + usize::from(value >> 8) % section.len();
                bytes[place] = value as u8;
            }
            2 => {
                bytes[operator.clone()].fill(0x01);
                bytes[operator.start] = if value & 1 == 1 { 0x00 } else { 0x01 };
            }
            // Another instruction with the same operands.
            3 => bytes[operator.start] = value as u8,
            // Another constant, as long as fits.
            4 if bytes[operator.start] == 0x41 => {
                let number = NUMBERS[usize::from(value) % NUMBERS.len()];
                write_leb(&mut bytes[operator.start + 1..operator.end], number);
            }
            // Two instructions change places.
            5 => {
                let other = map.operators[usize::from(value) % map.operators.len()].clone();
                if other.len() == operator.len() {
                    let moved = bytes[other.clone()].to_vec();
                    bytes.copy_within(operator.clone(), other.start);
                    bytes[operator].copy_from_slice(&moved);
                }
            }
            // A section comes a second time.
            6 => bytes.extend_from_within(section),
            7 if value % 8 == 0 => {
                bytes.truncate(place % bytes.len() + 1);
                break;
            }
            _ => {}
        }
    }
    bytes
}

/// A signed LEB128 number in exactly this room, its high bits cut off.
fn write_leb(room: &mut [u8], mut number: i32) {
    let last = room.len().saturating_sub(1);
    for (position, byte) in room.iter_mut().enumerate() {
        *byte = (number & 0x7f) as u8 | if position == last { 0 } else { 0x80 };
        number >>= 7;
    }
}
