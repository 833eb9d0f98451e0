//! `meridian policy test`: the cases of a policy, and properties that hold of every policy.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use meridian_bench::cases::{self, CaseKind, Property, RunCase, Wanted};
use meridian_core::{Budget, Dispatch, Eviction, PolicySource, SlotName};
use meridian_engine::{Components, Origin};
use serde::Serialize;

use super::manifest::{Manifest, Tests};
use super::{Allowed, build};
use crate::{Said, print_json, print_line, say};

#[derive(Args)]
pub(crate) struct TestArgs {
    /// Folder of a policy, path of a component, oci://HOST/NAME@sha256:DIGEST, or native:NAME
    #[arg(default_value = ".")]
    policy: String,
    /// Run the cases in this folder; by default, those in the folder `cases` beside the policy, if there is one
    #[arg(long, value_name = "DIR")]
    cases: Option<PathBuf>,
    /// Pass these options to the policy when its properties are tested, as one JSON object
    #[arg(long, default_value = "{}", value_name = "JSON")]
    config: String,
    /// Expect that the place of a candidate in the batch makes no difference
    #[arg(long)]
    order_independent: bool,
    /// Expect the same answers as this policy, bit for bit: the path of a component, or native:NAME
    #[arg(long, value_name = "POLICY")]
    same_as: Option<String>,
    /// Number of random batches, at most 1000000
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batches: u32,
    /// Set the deadline of one decision in milliseconds; by default, that of policy.toml or of the slot
    #[arg(long, value_name = "MS", value_parser = super::deadline_ms)]
    deadline_ms: Option<f32>,
    /// Limit linear memory to this many MiB; by default, that of policy.toml or of the slot
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1024))]
    memory_mib: Option<u32>,
    /// Seed of the random batches
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
}

/// The policy, and what its folder says of it.
struct Subject {
    origin: Origin,
    /// The one that it must agree with.
    other: Option<Origin>,
    cases: Option<PathBuf>,
    allowed: Allowed,
    tests: Tests,
}

impl Subject {
    fn of(policy: &str, other: Option<&str>) -> anyhow::Result<Self> {
        let components = Components::default();
        let path = Path::new(policy);
        let (origin, manifest, beside) = if PolicySource::of(policy).native().is_some() {
            (components.open(policy, Path::new(""))?, None, None)
        } else if path.is_dir() {
            let manifest = Manifest::of(path)?;
            let mut built = build::build(path, &path.join("target").join("policies"))?;
            let shown = path.display();
            ensure!(built.len() == 1, "{shown}: {} policies, expected one: name a component", built.len());
            (components.file(&built.remove(0).path)?, manifest, Some(path.join("cases")))
        } else {
            (super::open(&components, path)?, None, path.parent().map(|folder| folder.join("cases")))
        };
        let (allowed, tests) = manifest.map_or_else(Default::default, |manifest| (manifest.allowed(), manifest.test));
        let other = other.map(|other| components.open(other, Path::new(""))).transpose()?;
        Ok(Self { origin, other, cases: beside.filter(|folder| folder.is_dir()), allowed, tests })
    }
}

#[derive(Serialize)]
struct Tested {
    ok: bool,
    policy: String,
    slots: Vec<TestedSlot>,
}

#[derive(Serialize)]
struct TestedSlot {
    slot: SlotName,
    cases: Vec<RunCase>,
    properties: Vec<Property>,
}

impl TestedSlot {
    fn failures(&self) -> usize {
        self.cases.iter().filter(|case| case.failure.is_some()).count()
            + self.properties.iter().filter(|property| property.failure.is_some()).count()
    }
}

pub(super) fn run(args: &TestArgs, json: bool) -> anyhow::Result<()> {
    let parsed: serde_json::Value =
        serde_json::from_str(&args.config).with_context(|| format!("--config: {:?} is not JSON", args.config))?;
    ensure!(parsed.is_object(), "--config: {:?}: expected one JSON object", args.config);
    let subject = Subject::of(&args.policy, args.same_as.as_deref())?;
    let slots = subject.origin.slots()?;
    let unnamed = slots[0];
    let mut tested = Tested { ok: true, policy: subject.origin.source().to_owned(), slots: Vec::new() };
    for slot in slots {
        let found = match slot {
            SlotName::Dispatch => test_slot::<Dispatch>(args, &subject, unnamed),
            SlotName::Eviction => test_slot::<Eviction>(args, &subject, unnamed),
            SlotName::Budget => test_slot::<Budget>(args, &subject, unnamed),
        }?;
        tested.ok &= found.failures() == 0;
        tested.slots.push(found);
    }
    if json {
        print_json(&tested)?;
    } else {
        print(&tested)?;
    }
    if tested.ok { Ok(()) } else { Err(Said.into()) }
}

fn test_slot<K: CaseKind>(args: &TestArgs, subject: &Subject, unnamed: SlotName) -> anyhow::Result<TestedSlot> {
    let Subject { origin, other, cases, allowed, tests } = subject;
    let allowed = Allowed { deadline_ms: args.deadline_ms, memory_mib: args.memory_mib }.or(*allowed);
    let terms = allowed.unhurried(K::NAME);
    let folder = args.cases.as_ref().or(cases.as_ref());
    let cases =
        folder.map_or_else(|| Ok(Vec::new()), |folder| cases::run_folder::<K>(folder, unnamed, origin, terms))?;
    let wanted = Wanted {
        deadline: allowed.deadline(K::NAME),
        most_candidates: tests.most_candidates,
        order_independent: tests.order_independent || args.order_independent,
        same_as: other.as_ref(),
        batches: args.batches as usize,
        seed: args.seed,
    };
    let properties = cases::properties::<K>(origin, terms, &args.config, &wanted)?;
    Ok(TestedSlot { slot: K::NAME, cases, properties })
}

fn print(tested: &Tested) -> anyhow::Result<()> {
    let (mut run, mut failures) = (0, 0);
    for slot in &tested.slots {
        let label = slot.slot.label();
        let cases = slot.cases.iter().map(|RunCase { file, name, failure }| {
            let file = file.file_name().unwrap_or_default().to_string_lossy();
            (format!("{label}: {file}: {name}"), failure)
        });
        let properties = slot
            .properties
            .iter()
            .map(|Property { name, found, failure }| (format!("{label}: {name} ({found})"), failure));
        for (what, failure) in cases.chain(properties) {
            run += 1;
            match failure {
                None => print_line(&format!("ok      {what}"))?,
                Some(failure) => {
                    failures += 1;
                    print_line(&format!("FAILED  {what}\n        {failure}"))?;
                }
            }
        }
        if slot.cases.is_empty() {
            say(&format!("note: no cases of the {label} slot: only properties were tested (--cases names a folder)"));
        }
    }
    Ok(print_line(&format!("{}: {run} tests, {failures} failed", tested.policy))?)
}
