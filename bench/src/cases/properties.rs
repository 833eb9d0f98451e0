//! Properties that hold of every policy, tested on random batches that an engine might have.

use std::time::{Duration, Instant};

use meridian_core::Batch;
use meridian_engine::{Origin, Terms};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::Serialize;

use super::CaseKind;

/// Candidates of the batches that decisions are timed with.
pub const DECISION_CANDIDATES: [usize; 3] = [64, 1024, 4096];

/// Random batches of the slower properties, which start two policies for each.
const STARTED_BATCHES: usize = 100;
/// Most candidates of such a batch.
const MOST_CANDIDATES: usize = 96;
/// Timed decisions of each size; the median counts.
const TIMED: usize = 21;

/// A property of a policy.
#[derive(Clone, Debug, Serialize)]
pub struct Property {
    /// What must hold.
    pub name: String,
    /// What was measured or counted.
    pub found: String,
    /// Why it does not hold; `None` when it does.
    pub failure: Option<String>,
}

/// What a policy is held to.
#[derive(Clone)]
pub struct Wanted<'a> {
    /// The longest median decision, for each size up to `most_candidates`.
    pub deadline: Duration,
    /// The largest timed batch that must keep the deadline.
    pub most_candidates: usize,
    /// Whether the answer about a candidate must not depend on its place in the batch.
    pub order_independent: bool,
    /// Another policy that must give the same answers, bit for bit.
    pub same_as: Option<&'a Origin>,
    /// Number of random batches, and their seed.
    pub batches: usize,
    /// See `batches`.
    pub seed: u64,
}

/// Test the properties of a policy of slot `K`. `options` is one JSON object.
///
/// # Errors
/// The policy cannot be started.
pub fn properties<K: CaseKind>(
    origin: &Origin,
    terms: Terms,
    options: &str,
    wanted: &Wanted<'_>,
) -> anyhow::Result<Vec<Property>> {
    let batches = Batches::<K>::answered(origin, terms, options, wanted)?;
    let again = Batches::<K>::answered(origin, terms, options, wanted)?;
    let mut tested = vec![batches.valid(), batches.without_nan()];
    tested.push(batches.same_as("the same batches give the same answers", &again));
    if let Some(other) = wanted.same_as {
        let theirs = Batches::<K>::answered(other, terms, options, wanted)?;
        tested.push(batches.same_as(&format!("the same answers as {}", other.source()), &theirs));
    }
    if wanted.order_independent {
        tested.push(order_independent::<K>(origin, terms, options, wanted.seed)?);
    }
    for candidates in DECISION_CANDIDATES {
        tested.push(in_time::<K>(origin, terms, options, candidates, wanted)?);
    }
    Ok(tested)
}

fn property(name: &str, found: String, failure: Option<String>) -> Property {
    Property { name: name.to_owned(), found, failure }
}

/// Random batches and what an instance answered to them, one after the other.
struct Batches<K: CaseKind> {
    candidates: Vec<usize>,
    answers: Vec<Result<K::Decision, String>>,
}

impl<K: CaseKind> Batches<K> {
    fn answered(origin: &Origin, terms: Terms, options: &str, wanted: &Wanted<'_>) -> anyhow::Result<Self> {
        let mut policy = origin.policy::<K>(terms, options)?;
        let mut random = Pcg64::seed_from_u64(wanted.seed);
        let mut batches = Self { candidates: Vec::new(), answers: Vec::new() };
        for _ in 0..wanted.batches {
            let candidates = random.random_range(0..=MOST_CANDIDATES);
            let (facts, columns) = K::random(&mut random, policy.inputs(), candidates);
            let mut decision = K::Decision::default();
            let answer =
                policy.decide(&Batch { facts: &facts, candidates, columns: &columns, finished: &[] }, &mut decision);
            if answer.is_err() {
                policy.recover().map_err(|fault| anyhow::anyhow!("{}: {fault}", origin.source()))?;
            }
            let checked = answer.and_then(|()| K::check(&facts, &decision, candidates));
            batches.candidates.push(candidates);
            batches.answers.push(checked.map(|()| decision).map_err(|fault| fault.to_string()));
        }
        Ok(batches)
    }

    fn valid(&self) -> Property {
        let fault = self.answers.iter().zip(&self.candidates).enumerate().find_map(|(i, (answer, candidates))| {
            answer.as_ref().err().map(|fault| format!("batch {i} of {candidates} candidates: {fault}"))
        });
        property("every answer is valid", self.counted(), fault)
    }

    fn without_nan(&self) -> Property {
        let has_nan = |answer: &Result<K::Decision, String>| {
            answer.as_ref().is_ok_and(|decision| K::keys(decision).iter().any(|key| key.is_nan()))
        };
        let found = self.answers.iter().filter(|answer| has_nan(answer)).count();
        let failure = (found > 0).then(|| format!("{found} batches have a NaN key, which goes last"));
        property("no key is NaN", self.counted(), failure)
    }

    fn same_as(&self, name: &str, other: &Self) -> Property {
        // `Debug` writes floats so that different bits are different text, but for those of NaN.
        let text = |answer: &Result<K::Decision, String>| answer.as_ref().map(|decision| format!("{decision:?}")).ok();
        let differs = self.answers.iter().zip(&other.answers).filter(|(one, other)| text(one) != text(other)).count();
        let failure = (differs > 0).then(|| format!("{differs} batches are answered differently"));
        property(name, self.counted(), failure)
    }

    fn counted(&self) -> String {
        format!("{} random batches", self.candidates.len())
    }
}

/// A batch, and the same candidates in another order: each must get the same answer.
fn order_independent<K: CaseKind>(origin: &Origin, terms: Terms, options: &str, seed: u64) -> anyhow::Result<Property> {
    let mut random = Pcg64::seed_from_u64(seed);
    let mut failure = None;
    for i in 0..STARTED_BATCHES {
        // A policy of its own for each: what one remembers of the first would make a difference in the second.
        let [mut first, mut second] = [origin.policy::<K>(terms, options)?, origin.policy::<K>(terms, options)?];
        let n = random.random_range(1..=MOST_CANDIDATES);
        let (facts, columns) = K::random(&mut random, first.inputs(), n);
        let mut order: Vec<usize> = (0..n).collect();
        order.shuffle(&mut random);
        let shuffled: Vec<f32> = columns.chunks(n).flat_map(|column| order.iter().map(|at| column[*at])).collect();
        let (mut one, mut other) = (K::Decision::default(), K::Decision::default());
        let answered = first
            .decide(&Batch { facts: &facts, candidates: n, columns: &columns, finished: &[] }, &mut one)
            .and_then(|()| {
                second.decide(&Batch { facts: &facts, candidates: n, columns: &shuffled, finished: &[] }, &mut other)
            });
        let (one, other) = (K::answers(&one), K::answers(&other));
        let moved: Vec<_> = order.iter().filter_map(|at| one.get(*at).cloned()).collect();
        if let Err(fault) = answered {
            failure = Some(format!("batch {i}: {fault}"));
            break;
        }
        if moved != other {
            let place = moved.iter().zip(&other).position(|(one, other)| one != other).unwrap_or_default();
            let at = |answers: &[String]| answers.get(place).cloned().unwrap_or_else(|| "no answer".into());
            failure = Some(format!("batch {i}: {} in one order, {} in another", at(&moved), at(&other)));
            break;
        }
    }
    Ok(property("the order of candidates makes no difference", format!("{STARTED_BATCHES} random batches"), failure))
}

/// The median decision over `candidates` candidates, against the deadline.
fn in_time<K: CaseKind>(
    origin: &Origin,
    terms: Terms,
    options: &str,
    candidates: usize,
    wanted: &Wanted<'_>,
) -> anyhow::Result<Property> {
    let mut policy = origin.policy::<K>(terms, options)?;
    let mut random = Pcg64::seed_from_u64(wanted.seed);
    let (facts, columns) = K::random(&mut random, policy.inputs(), candidates);
    let batch = Batch { facts: &facts, candidates, columns: &columns, finished: &[] };
    let mut decision = K::Decision::default();
    let mut took = Vec::with_capacity(TIMED);
    let name = format!("{candidates} candidates within the deadline");
    for _ in 0..TIMED {
        K::clear(&mut decision);
        let started = Instant::now();
        let answered = policy.decide(&batch, &mut decision);
        took.push(started.elapsed());
        if let Err(fault) = answered {
            return Ok(property(&name, "a fault".into(), Some(fault.to_string())));
        }
    }
    took.sort_unstable();
    let median = took[TIMED / 2];
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let found = format!("median {:.1} us, slowest {:.1} us", us(median), us(took[TIMED - 1]));
    let is_late = median > wanted.deadline && candidates <= wanted.most_candidates;
    let failure =
        is_late.then(|| format!("median {:.1} us, expected at most {:.0} us", us(median), us(wanted.deadline)));
    Ok(property(&name, found, failure))
}
