//! The fields of a row of each slot. Writing, reading and the schema use this one description.

use meridian_core::budget::{Load, Point, Verdict};
use meridian_core::{Budget, Decision, Dispatch, Eviction, FaultKind, Memory, SlotKind, Step, Subject};

use super::recorder::{Item, Queued};
use super::row::{Outcome, Recorded};
use super::tap::MAX_CANDIDATES;

/// A slot whose decisions can be recorded; every slot is.
///
/// ```
/// use meridian_core::Dispatch;
/// use meridian_runtime::recording::Recordable;
///
/// assert_eq!((Dispatch::COLUMNS.len(), Dispatch::COLUMN_NAMES[2]), (19, "in_wait_ms"));
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

const SOURCES: &[&str] = &["policy", "default", "fallback"];
/// The labels of [`FaultKind::ALL`], and one for a policy that could not be asked.
const FAULTS: &[&str] = &["trap", "deadline", "memory", "bad-answer", "init", "load", "not-asked"];
const NOT_ASKED: u8 = 6;

/// Every field of a row.
pub(super) fn visit<K: Recordable>(row: &mut Recorded<K>, visit: &mut Visit<'_>) -> Result<(), BadField> {
    let Recorded { seq, outcome, restarted, snapshot, facts, candidates, columns, decision } = row;
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
    K::decision(decision, visit)
}

type EvictionColumn = <Eviction as SlotKind>::Column;
type BudgetColumn = <Budget as SlotKind>::Column;
type BudgetDecision = <Budget as SlotKind>::Decision;

impl Recordable for Dispatch {
    const COLUMNS: &'static [Self::Column] = &<Dispatch as SlotKind>::Column::ALL;
    const COLUMN_NAMES: &'static [&'static str] = &[
        "in_phase",
        "in_state",
        "in_wait_ms",
        "in_since_progress_ms",
        "in_slack_ms",
        "in_prompt_tokens",
        "in_cached_tokens",
        "in_computed_tokens",
        "in_think_tokens",
        "in_output_tokens",
        "in_remaining_tokens",
        "in_kv_blocks",
        "in_priority",
        "in_tenant",
        "in_preemptions",
        "in_eat",
        "in_eat_variance",
        "in_rpdi",
        "in_output_ms",
    ];
}

impl Fields for Dispatch {
    fn item(record: Box<Queued<Self>>) -> Item {
        Item::Dispatch(record)
    }

    fn facts(facts: &mut Step, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let Step {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            running,
            running_think,
            running_output,
            waiting,
            decode_tokens,
            fixed_ms,
            decode_token_ms,
            prefill_token_ms,
        } = facts;
        visit("now_ms", Field::F64(now_ms))?;
        visit("token_budget", Field::U32(token_budget))?;
        visit("free_blocks", Field::U32(free_blocks))?;
        visit("total_blocks", Field::U32(total_blocks))?;
        visit("running", Field::U32(running))?;
        visit("running_think", Field::U32(running_think))?;
        visit("running_output", Field::U32(running_output))?;
        visit("waiting", Field::U32(waiting))?;
        visit("decode_tokens", Field::U32(decode_tokens))?;
        visit("fixed_ms", Field::F32(fixed_ms))?;
        visit("decode_token_ms", Field::F32(decode_token_ms))?;
        visit("prefill_token_ms", Field::F32(prefill_token_ms))
    }

    fn decision(decision: &mut Decision, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let Decision { keys, token_budget, token_caps } = decision;
        visit("out_keys", Field::F32s(keys))?;
        visit("out_token_budget", Field::OptionalU32(token_budget))?;
        visit("out_token_caps", Field::U32s(token_caps))
    }

    fn copy(from: &Decision, into: &mut Decision) {
        into.keys.clone_from(&from.keys);
        into.token_budget = from.token_budget;
        into.token_caps.clone_from(&from.token_caps);
    }

    fn same(one: &Decision, other: &Decision) -> bool {
        same_bits(&one.keys, &other.keys)
            && one.token_budget == other.token_budget
            && one.token_caps == other.token_caps
    }

    fn shown(decision: &Decision, other: &Decision) -> String {
        if !same_bits(&decision.keys, &other.keys) {
            return shown_keys(&decision.keys, &other.keys);
        }
        if decision.token_budget != other.token_budget {
            return decision.token_budget.map_or("no token budget".into(), |budget| format!("token budget {budget}"));
        }
        shown_at("token cap", &decision.token_caps, &other.token_caps, |one, other| one == other, u32::to_string)
    }
}

impl Recordable for Eviction {
    const COLUMNS: &'static [Self::Column] = &EvictionColumn::ALL;
    const COLUMN_NAMES: &'static [&'static str] =
        &["in_tier", "in_blocks", "in_position", "in_hits", "in_age_ms", "in_computed_tokens"];
}

impl Fields for Eviction {
    fn item(record: Box<Queued<Self>>) -> Item {
        Item::Eviction(record)
    }

    fn facts(facts: &mut Memory, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks } = facts;
        visit("now_ms", Field::F64(now_ms))?;
        let mut index = *subject as u8;
        visit("subject", Field::Choice(&mut index, &["blocks", "requests"]))?;
        *subject = if index == 0 { Subject::Blocks } else { Subject::Requests };
        visit("free_blocks", Field::U32(free_blocks))?;
        visit("cached_blocks", Field::U32(cached_blocks))?;
        visit("total_blocks", Field::U32(total_blocks))
    }

    fn decision(keys: &mut Vec<f32>, visit: &mut Visit<'_>) -> Result<(), BadField> {
        visit("out_keys", Field::F32s(keys))
    }

    fn copy(from: &Vec<f32>, into: &mut Vec<f32>) {
        into.clone_from(from);
    }

    fn same(one: &Vec<f32>, other: &Vec<f32>) -> bool {
        same_bits(one, other)
    }

    fn shown(keys: &Vec<f32>, other: &Vec<f32>) -> String {
        shown_keys(keys, other)
    }
}

impl Recordable for Budget {
    const COLUMNS: &'static [Self::Column] = &BudgetColumn::ALL;
    const COLUMN_NAMES: &'static [&'static str] = &[
        "in_prompt_tokens",
        "in_think_tokens",
        "in_remaining_tokens",
        "in_think_ms",
        "in_priority",
        "in_tenant",
        "in_signal",
        "in_probes",
        "in_eat",
        "in_eat_variance",
        "in_rpdi",
        "in_same_answers",
        "in_slack_ms",
    ];
}

impl Fields for Budget {
    fn item(record: Box<Queued<Self>>) -> Item {
        Item::Budget(record)
    }

    fn facts(facts: &mut Load, visit: &mut Visit<'_>) -> Result<(), BadField> {
        let Load { now_ms, point, thinking, answering, waiting, free_blocks, total_blocks, configured } = facts;
        visit("now_ms", Field::F64(now_ms))?;
        let mut index = *point as u8;
        visit("point", Field::Choice(&mut index, &["start", "probe"]))?;
        *point = if index == 0 { Point::Start } else { Point::Probe };
        visit("thinking", Field::U32(thinking))?;
        visit("answering", Field::U32(answering))?;
        visit("waiting", Field::U32(waiting))?;
        visit("free_blocks", Field::U32(free_blocks))?;
        visit("total_blocks", Field::U32(total_blocks))?;
        visit("min_think_tokens", Field::U32(&mut configured.min_think_tokens))?;
        visit("max_think_tokens", Field::U32(&mut configured.max_think_tokens))?;
        visit("eat_probe_interval_tokens", Field::U32(&mut configured.eat_probe_interval_tokens))?;
        visit("ema_alpha", Field::F64(&mut configured.ema_alpha))?;
        visit("eat_variance_threshold", Field::F64(&mut configured.eat_variance_threshold))?;
        visit("eat_max_bits", Field::F64(&mut configured.eat_max_bits))?;
        visit("min_probes", Field::U32(&mut configured.min_probes))?;
        visit("rpdi_window", Field::U32(&mut configured.rpdi_window))?;
        visit("rpdi_threshold", Field::F64(&mut configured.rpdi_threshold))
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
        macro_rules! each {
            ($($field:ident $name:literal $kind:ident;)*) => {$(
                let mut values: Vec<_> = thresholds.iter().map(|thresholds| thresholds.$field).collect();
                visit($name, Field::$kind(&mut values))?;
                if *counts.get_or_insert(values.len()) != values.len() {
                    return Err(format!("{}: {} values, expected as many as the others of its row", $name, values.len()));
                }
                thresholds.resize(values.len(), Load::default().configured);
                for (thresholds, value) in thresholds.iter_mut().zip(values) {
                    thresholds.$field = value;
                }
            )*};
        }
        each! {
            min_think_tokens "out_min_think_tokens" U32s;
            max_think_tokens "out_max_think_tokens" U32s;
            eat_probe_interval_tokens "out_eat_probe_interval_tokens" U32s;
            ema_alpha "out_ema_alpha" F64s;
            eat_variance_threshold "out_eat_variance_threshold" F64s;
            eat_max_bits "out_eat_max_bits" F64s;
            min_probes "out_min_probes" U32s;
            rpdi_window "out_rpdi_window" U32s;
            rpdi_threshold "out_rpdi_threshold" F64s;
        }
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

fn shown_keys(keys: &[f32], other: &[f32]) -> String {
    shown_at(
        "key",
        keys,
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
