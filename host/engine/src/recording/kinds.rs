//! The fields of a row of each slot. Writing, reading and the schema use this one description; columns and facts are those of
//! the contract's tables.

use meridian_core::budget::{Load, Point, Thresholds, Verdict};
use meridian_core::{Budget, Decision, Dispatch, Eviction, FaultKind, Memory, Ranking, SlotKind, Step, Subject};
use meridian_policy_sdk as sdk;

use super::recorder::{Item, Queued};
use super::row::{Outcome, Recorded};
use super::tap::MAX_CANDIDATES;

/// A slot whose decisions can be recorded; every slot is.
///
/// ```
/// use meridian_core::Dispatch;
/// use meridian_engine::recording::Recordable;
///
/// assert_eq!((Dispatch::COLUMNS.len(), Dispatch::COLUMN_NAMES[2]), (Dispatch::COLUMN_NAMES.len(), "in_wait_ms"));
/// ```
pub trait Recordable: SlotKind + Fields {
    /// Every column, in the order of a row's matrix.
    const COLUMNS: &'static [Self::Column];
    /// Their names in a file.
    const COLUMN_NAMES: &'static [&'static str];
}

/// Visits a row's fields in the order of the schema: to describe them, to append them, or to set them.
pub type Visit<'a> = dyn FnMut(&'static str, Field<'_>) -> Result<(), BadField> + 'a;

/// A field with an invalid value; the text follows its name.
pub type BadField = String;

/// A field of a row.
pub enum Field<'a> {
    U64(&'a mut u64),
    U32(&'a mut u32),
    F32(&'a mut f32),
    F64(&'a mut f64),
    Flag(&'a mut bool),
    /// An index into names, written as text.
    Choice(&'a mut u8, &'static [&'static str]),
    OptionalChoice(&'a mut Option<u8>, &'static [&'static str]),
    OptionalU32(&'a mut Option<u32>),
    OptionalBytes(&'a mut Option<Vec<u8>>),
    U8s(&'a mut Vec<u8>),
    U32s(&'a mut Vec<u32>),
    F32s(&'a mut Vec<f32>),
    F64s(&'a mut Vec<f64>),
    /// A row of the matrix; a reader appends it.
    Column {
        columns: &'a mut Vec<f32>,
        index: usize,
        candidates: usize,
    },
}

/// The internal part of [`Recordable`].
pub trait Fields: SlotKind {
    /// A record for the writer's one queue.
    fn item(record: Box<Queued<Self>>) -> Item
    where
        Self: Recordable;
    fn facts(facts: &mut Self::Facts, visit: &mut Visit<'_>) -> Result<(), BadField>;
    fn decision(decision: &mut Self::Decision, visit: &mut Visit<'_>) -> Result<(), BadField>;
    /// Copy, and keep the memory of `into`.
    fn copy(from: &Self::Decision, into: &mut Self::Decision);
    /// Whether two answers are the same to the bit.
    fn same(one: &Self::Decision, other: &Self::Decision) -> bool;
    /// The first difference of two answers, as text.
    fn shown(decision: &Self::Decision, other: &Self::Decision) -> String;
}

/// A fact of the contract: its place among the fields of a row.
trait Fact {
    fn visit(&mut self, name: &'static str, visit: &mut Visit<'_>) -> Result<(), BadField>;
}

macro_rules! numbers {
    ($($number:ident $field:ident;)*) => {$(
        impl Fact for $number {
            fn visit(&mut self, name: &'static str, visit: &mut Visit<'_>) -> Result<(), BadField> {
                visit(name, Field::$field(self))
            }
        }
    )*};
}

numbers! { u32 U32; u64 U64; f32 F32; f64 F64; }

/// A number of which an answer has a list.
trait Listed: Sized {
    fn list(values: &mut Vec<Self>) -> Field<'_>;
}

impl Listed for u32 {
    fn list(values: &mut Vec<Self>) -> Field<'_> {
        Field::U32s(values)
    }
}

impl Listed for f64 {
    fn list(values: &mut Vec<Self>) -> Field<'_> {
        Field::F64s(values)
    }
}

impl Fact for Subject {
    fn visit(&mut self, name: &'static str, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let mut index = *self as u8;
        visit(name, Field::Choice(&mut index, &["blocks", "requests"]))?;
        *self = if index == 0 { Self::Blocks } else { Self::Requests };
        Ok(())
    }
}

impl Fact for Point {
    fn visit(&mut self, name: &'static str, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let mut index = *self as u8;
        visit(name, Field::Choice(&mut index, &["start", "probe"]))?;
        *self = if index == 0 { Self::Start } else { Self::Probe };
        Ok(())
    }
}

/// Visits the fields of a record; called by a table of the contract.
macro_rules! facts {
    ($facts:expr, $visit:expr, [$($field:ident $type:ident $doc:literal;)*]) => {{
        $(Fact::visit(&mut $facts.$field, stringify!($field), $visit)?;)*
        Ok(())
    }};
}

/// Visit the fields of a load. The host gives it the field `point`, which the record does not have, after the first one.
macro_rules! load {
    ($facts:expr, $visit:expr, [$first:ident $type:ident $doc:literal; $($rest:tt)*]) => {{
        Fact::visit(&mut $facts.$first, stringify!($first), $visit)?;
        Fact::visit(&mut $facts.point, "point", $visit)?;
        facts!($facts, $visit, [$($rest)*])
    }};
}

/// Names of the columns in a file; called by a table of the contract.
macro_rules! names {
    ([$($variant:ident $method:ident $doc:literal;)*] $numbers:tt) => {
        [$(concat!("in_", stringify!($method))),*]
    };
}

/// Under the names of its fields, which no other fact has.
impl Fact for Thresholds {
    fn visit(&mut self, _name: &'static str, visit: &mut Visit<'_>) -> Result<(), BadField> {
        sdk::__budget_thresholds!(facts! self, visit,)
    }
}

const SOURCES: &[&str] = &["policy", "default", "fallback"];
/// The labels of [`FaultKind::ALL`], and one for a policy that could not be asked.
const FAULTS: &[&str] = &["trap", "deadline", "memory", "bad-answer", "init", "load", "not-asked"];
const NOT_ASKED: u8 = 6;

/// Every field of a row.
pub(super) fn visit<K: Recordable>(row: &mut Recorded<K>, visit: &mut Visit<'_>) -> Result<(), BadField> {
    let Recorded { seq, outcome, restarted, snapshot, facts, candidates, columns, finished, decision } = row;
    let (mut source, mut fault) = match outcome {
        Outcome::Decided => (0, None),
        Outcome::LeftToDefault => (1, None),
        Outcome::Faulted(kind) => (2, Some(*kind as u8)),
        Outcome::NotAsked => (2, Some(NOT_ASKED)),
    };
    visit("seq", Field::U64(seq))?;
    visit("source", Field::Choice(&mut source, SOURCES))?;
    visit("fault", Field::OptionalChoice(&mut fault, FAULTS))?;
    *outcome = match (source, fault) {
        (0, None) => Outcome::Decided,
        (1, None) => Outcome::LeftToDefault,
        (2, Some(NOT_ASKED)) => Outcome::NotAsked,
        (2, Some(kind)) if usize::from(kind) < FaultKind::ALL.len() => {
            Outcome::Faulted(FaultKind::ALL[usize::from(kind)])
        }
        _ => return Err("fault: expected one exactly where source is \"fallback\"".into()),
    };
    visit("restarted", Field::Flag(restarted))?;
    visit("snapshot", Field::OptionalBytes(snapshot))?;
    let mut count = u32::try_from(*candidates).unwrap_or(u32::MAX);
    visit("candidates", Field::U32(&mut count))?;
    *candidates = count as usize;
    if *candidates > MAX_CANDIDATES {
        return Err(format!("candidates: {count}: expected at most {MAX_CANDIDATES}"));
    }
    K::facts(facts, visit)?;
    for (index, name) in K::COLUMN_NAMES.iter().enumerate() {
        visit(name, Field::Column { columns, index, candidates: *candidates })?;
    }
    visit("finished", Field::U32s(finished))?;
    K::decision(decision, visit)
}

type EvictionColumn = <Eviction as SlotKind>::Column;
type BudgetColumn = <Budget as SlotKind>::Column;
type BudgetDecision = <Budget as SlotKind>::Decision;

impl Recordable for Dispatch {
    const COLUMNS: &'static [Self::Column] = &<Dispatch as SlotKind>::Column::ALL;
    const COLUMN_NAMES: &'static [&'static str] = &sdk::__dispatch_columns!(names!);
}

impl Fields for Dispatch {
    fn item(record: Box<Queued<Self>>) -> Item {
        Item::Dispatch(record)
    }

    fn facts(facts: &mut Step, visit: &mut Visit<'_>) -> Result<(), BadField> {
        sdk::__dispatch_step!(facts! facts, visit,)
    }

    fn decision(decision: &mut Decision, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let Decision { keys, token_budget, token_caps, victim_keys } = decision;
        visit("out_keys", Field::F32s(keys))?;
        visit("out_token_budget", Field::OptionalU32(token_budget))?;
        visit("out_token_caps", Field::U32s(token_caps))?;
        visit("out_victim_keys", Field::F32s(victim_keys))
    }

    fn copy(from: &Decision, into: &mut Decision) {
        into.keys.clone_from(&from.keys);
        into.token_budget = from.token_budget;
        into.token_caps.clone_from(&from.token_caps);
        into.victim_keys.clone_from(&from.victim_keys);
    }

    fn same(one: &Decision, other: &Decision) -> bool {
        same_bits(&one.keys, &other.keys)
            && one.token_budget == other.token_budget
            && one.token_caps == other.token_caps
            && same_bits(&one.victim_keys, &other.victim_keys)
    }

    fn shown(decision: &Decision, other: &Decision) -> String {
        if !same_bits(&decision.keys, &other.keys) {
            return shown_floats("key", &decision.keys, &other.keys);
        }
        if decision.token_budget != other.token_budget {
            return decision.token_budget.map_or("no token budget".into(), |budget| format!("token budget {budget}"));
        }
        if decision.token_caps != other.token_caps {
            let same = |one: &u32, other: &u32| one == other;
            return shown_at("token cap", &decision.token_caps, &other.token_caps, same, u32::to_string);
        }
        shown_floats("victim key", &decision.victim_keys, &other.victim_keys)
    }
}

impl Recordable for Eviction {
    const COLUMNS: &'static [Self::Column] = &EvictionColumn::ALL;
    const COLUMN_NAMES: &'static [&'static str] = &sdk::__eviction_columns!(names!);
}

impl Fields for Eviction {
    fn item(record: Box<Queued<Self>>) -> Item {
        Item::Eviction(record)
    }

    fn facts(facts: &mut Memory, visit: &mut Visit<'_>) -> Result<(), BadField> {
        sdk::__eviction_memory!(facts! facts, visit,)
    }

    fn decision(ranking: &mut Ranking, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let Ranking { keys, keep_ms } = ranking;
        visit("out_keys", Field::F32s(keys))?;
        visit("out_keep_ms", Field::F32s(keep_ms))
    }

    fn copy(from: &Ranking, into: &mut Ranking) {
        into.keys.clone_from(&from.keys);
        into.keep_ms.clone_from(&from.keep_ms);
    }

    fn same(one: &Ranking, other: &Ranking) -> bool {
        same_bits(&one.keys, &other.keys) && same_bits(&one.keep_ms, &other.keep_ms)
    }

    fn shown(ranking: &Ranking, other: &Ranking) -> String {
        if !same_bits(&ranking.keys, &other.keys) {
            return shown_floats("key", &ranking.keys, &other.keys);
        }
        shown_floats("time to keep", &ranking.keep_ms, &other.keep_ms)
    }
}

impl Recordable for Budget {
    const COLUMNS: &'static [Self::Column] = &BudgetColumn::ALL;
    const COLUMN_NAMES: &'static [&'static str] = &sdk::__budget_columns!(names!);
}

impl Fields for Budget {
    fn item(record: Box<Queued<Self>>) -> Item {
        Item::Budget(record)
    }

    fn facts(facts: &mut Load, visit: &mut Visit<'_>) -> Result<(), BadField> {
        sdk::__budget_load!(load! facts, visit,)
    }

    fn decision(decision: &mut BudgetDecision, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let BudgetDecision { thresholds, verdicts } = decision;
        let mut codes: Vec<u8> = verdicts.iter().map(|verdict| *verdict as u8).collect();
        visit("out_verdicts", Field::U8s(&mut codes))?;
        verdicts.clear();
        for code in codes {
            verdicts.push(match code {
                0 => Verdict::Default,
                1 => Verdict::KeepThinking,
                2 => Verdict::EndNow,
                _ => return Err(format!("out_verdicts: {code}: expected 0, 1 or 2")),
            });
        }
        // One list per field: readers unnest them by name, without a struct in between.
        let mut counts: Option<usize> = None;
        macro_rules! lists {
            ([$($field:ident $kind:ident $doc:literal;)*]) => {$(
                let mut values: Vec<$kind> = thresholds.iter().map(|thresholds| thresholds.$field).collect();
                let name = concat!("out_", stringify!($field));
                visit(name, $kind::list(&mut values))?;
                if *counts.get_or_insert(values.len()) != values.len() {
                    return Err(format!("{name}: {} values, expected as many as the others of its row", values.len()));
                }
                thresholds.resize(values.len(), Load::default().configured);
                for (thresholds, value) in thresholds.iter_mut().zip(values) {
                    thresholds.$field = value;
                }
            )*};
        }
        sdk::__budget_thresholds!(lists!);
        Ok(())
    }

    fn copy(from: &BudgetDecision, into: &mut BudgetDecision) {
        into.thresholds.clone_from(&from.thresholds);
        into.verdicts.clone_from(&from.verdicts);
    }

    fn same(one: &BudgetDecision, other: &BudgetDecision) -> bool {
        // The compared numbers are finite; of equal numbers, only the two zeros differ in bits.
        one == other && format!("{:?}", one.thresholds) == format!("{:?}", other.thresholds)
    }

    fn shown(decision: &BudgetDecision, other: &BudgetDecision) -> String {
        if decision.verdicts != other.verdicts {
            return shown_at(
                "verdict",
                &decision.verdicts,
                &other.verdicts,
                |one, other| one == other,
                |verdict| format!("{verdict:?}"),
            );
        }
        let same = |one: &_, other: &_| format!("{one:?}") == format!("{other:?}");
        shown_at("thresholds", &decision.thresholds, &other.thresholds, same, |thresholds| format!("{thresholds:?}"))
    }
}

fn same_bits(one: &[f32], other: &[f32]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.to_bits() == other.to_bits())
}

fn shown_floats(what: &str, values: &[f32], other: &[f32]) -> String {
    shown_at(
        what,
        values,
        other,
        |one, other| one.to_bits() == other.to_bits(),
        |key| {
            if key.is_nan() { format!("NaN (bits {:08x})", key.to_bits()) } else { key.to_string() }
        },
    )
}

/// The first value that differs from that of the other list.
fn shown_at<T>(
    what: &str,
    values: &[T],
    other: &[T],
    same: impl Fn(&T, &T) -> bool,
    shown: impl Fn(&T) -> String,
) -> String {
    if values.len() != other.len() {
        return match values.len() {
            0 => format!("no {what}s"),
            count => format!("{count} {what}s"),
        };
    }
    let first = values.iter().zip(other).enumerate().find(|(_, (one, other))| !same(one, other));
    first.map_or_else(|| format!("the same {what}s"), |(i, (value, _))| format!("{what} {i}: {}", shown(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `SinceProgressMs` as `in_since_progress_ms`.
    fn name(column: &impl std::fmt::Debug) -> String {
        let mut name = String::from("in");
        for letter in format!("{column:?}").chars() {
            if letter.is_ascii_uppercase() {
                name.push('_');
            }
            name.push(letter.to_ascii_lowercase());
        }
        name
    }

    fn check<K: Recordable>() {
        let names: Vec<String> = K::COLUMNS.iter().map(name).collect();
        assert_eq!(K::COLUMN_NAMES, names);
    }

    #[test]
    fn columns_are_named_as_in_the_contract() {
        check::<Dispatch>();
        check::<Eviction>();
        check::<Budget>();
        let labels: Vec<&str> = FaultKind::ALL.iter().map(|kind| kind.label()).collect();
        assert_eq!(FAULTS[..6], labels);
        assert_eq!(FAULTS[usize::from(NOT_ASKED)], "not-asked");
    }
}
