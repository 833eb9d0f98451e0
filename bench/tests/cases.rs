//! Every shipped policy meets its cases and the properties of all policies, natively and as a component.
//!
//! Needs the components: `make policies`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use meridian_bench::cases::{CaseKind, Wanted, properties, run_folder};
use meridian_core::{Budget, Dispatch, Eviction, MeridianConfig, SlotConfig, SlotKind, SlotName};
use meridian_engine::{Components, Origin, Terms};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn terms() -> Terms {
    Terms::unhurried(&SlotConfig::dispatch(), MeridianConfig::default().scheduler.targets())
}

/// A shipped policy, natively and as a component.
fn both(components: &Components, name: &str) -> [Origin; 2] {
    [Origin::native(name), components.file(&root().join(format!("target/policies/{name}.wasm"))).unwrap()]
}

/// Cases of slot `K` that were run with `name`.
fn meets_its_cases<K: CaseKind>(components: &Components, name: &str) -> usize {
    let mut cases = 0;
    for origin in both(components, name) {
        let unnamed = origin.slots().unwrap()[0];
        let folder = root().join("policies/shipped/cases").join(name);
        for case in run_folder::<K>(&folder, unnamed, &origin, terms()).unwrap() {
            let failure = case.failure.as_deref().unwrap_or_default();
            assert!(failure.is_empty(), "{}: {}: {}: {failure}", origin.source(), case.file.display(), case.name);
            cases += 1;
        }
    }
    cases
}

#[test]
fn every_policy_meets_its_cases() {
    let components = Components::default();
    for name in Dispatch::NATIVES {
        assert!(meets_its_cases::<Dispatch>(&components, name) > 0, "{name} has no cases");
    }
    // The cases of `noop` are those of the dispatch slot.
    for name in Eviction::NATIVES.iter().filter(|name| **name != "noop") {
        assert!(meets_its_cases::<Eviction>(&components, name) > 0, "{name} has no cases");
    }
    for name in Budget::NATIVES.iter().filter(|name| **name != "noop") {
        assert!(meets_its_cases::<Budget>(&components, name) > 0, "{name} has no cases");
    }
}

/// Those whose answer about one candidate depends on its place: by arrival, or in the last bit, where a sum over the batch goes
/// into every key.
const DEPENDENT: [&str; 2] = ["fcfs", "balanced"];

fn has_the_properties<K: CaseKind>(components: &Components) {
    for name in K::NATIVES {
        // A busy machine says nothing about a policy: the deadline is that of an unhurried run.
        let wanted = Wanted {
            deadline: Duration::from_secs(10),
            most_candidates: 4096,
            order_independent: !DEPENDENT.contains(name),
            same_as: Some(&Origin::native(name)),
            batches: 100,
            seed: 7,
        };
        for origin in both(components, name) {
            for property in properties::<K>(&origin, terms(), "{}", &wanted).unwrap() {
                let failure = property.failure.as_deref().unwrap_or_default();
                assert!(failure.is_empty(), "{}, {}: {}: {failure}", origin.source(), K::NAME.label(), property.name);
            }
        }
    }
}

#[test]
fn every_policy_has_the_properties_of_all() {
    let components = Components::default();
    has_the_properties::<Dispatch>(&components);
    has_the_properties::<Eviction>(&components);
    has_the_properties::<Budget>(&components);
}

/// Files of one case each, in a folder of this test's own.
fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for (file, content) in files {
        std::fs::write(folder.join(file), content).unwrap();
    }
    folder
}

#[test]
fn a_case_that_does_not_hold_says_what_was_found() {
    let candidates = "[{ phase = \"prefill\", state = \"waiting\", priority = 2 }, \
                      { phase = \"prefill\", state = \"waiting\", priority = 1 }]";
    let case =
        |name: &str, expected: &str| format!("[[case]]\nname = \"{name}\"\ncandidates = {candidates}\n{expected}\n");
    let folder = folder(
        "failing",
        &[
            ("1.toml", &case("order", "order = [0, 1]")),
            ("2.toml", &case("budget", "token_budget = 5")),
            ("3.toml", &case("options", "config = { urgent = 1 }")),
            ("4.toml", &case("default", "default = true")),
            ("note.txt", "no case"),
        ],
    );
    let run = run_folder::<Dispatch>(&folder, SlotName::Dispatch, &Origin::native("priority"), terms()).unwrap();
    let failures: Vec<_> = run.iter().map(|case| case.failure.clone().unwrap_or_default()).collect();
    assert_eq!(failures[0], "order: [1, 0], expected [0, 1]");
    assert_eq!(failures[1], "token_budget: None, expected Some(5)");
    assert!(failures[2].contains("config: this policy takes no options"), "{}", failures[2]);
    assert_eq!(failures[3], "leaves the step to the default: false, expected true");
    assert_eq!(run.len(), 4);
}

#[test]
fn a_file_that_is_no_case_is_refused_with_its_line() {
    for (content, expected) in [
        ("[[case]]\nname = \"a\"\ncandidate = []\n", "wrong.toml:3: unknown field `candidate`"),
        ("slot = \"memory\"\n", "wrong.toml:1: unknown variant `memory`"),
        ("[[case]]\nname = \"a\ncandidates = []\n", "wrong.toml:2: "),
        ("case = []\n", "wrong.toml: no case, expected at least one [[case]]"),
    ] {
        let folder = folder("refused", &[("wrong.toml", content)]);
        let refused = run_folder::<Dispatch>(&folder, SlotName::Dispatch, &Origin::native("fcfs"), terms());
        let error = format!("{:#}", refused.unwrap_err());
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_file_of_another_slot_is_left_alone() {
    let folder = folder("others", &[("a.toml", "slot = \"budget\"\n[[case]]\nname = \"a\"\n")]);
    assert!(run_folder::<Dispatch>(&folder, SlotName::Dispatch, &Origin::native("fcfs"), terms()).unwrap().is_empty());
}
