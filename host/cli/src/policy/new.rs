//! `meridian policy new`: a folder with a policy that builds and passes its tests.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use meridian_core::SlotName;
use serde::Serialize;

use super::Language;
use super::manifest::{MANIFEST, check_name};
use crate::{print_json, print_line};

#[derive(Args)]
pub(crate) struct NewArgs {
    /// Name of the policy: letters, digits and hyphens in lower case
    name: String,
    /// Language of the policy
    #[arg(long, value_enum)]
    lang: Language,
    /// Slot that the policy fills
    #[arg(long, default_value = "dispatch", value_parser = crate::ctl::slot_parser())]
    slot: SlotName,
    /// Make the folder in this one
    #[arg(long, default_value = ".", value_name = "DIR")]
    parent: PathBuf,
}

/// The contract, as the host speaks it.
const WIT: &[(&str, &str)] = &[
    ("world.wit", include_str!("../../../../wit/world.wit")),
    ("lifecycle.wit", include_str!("../../../../wit/lifecycle.wit")),
    ("dispatch.wit", include_str!("../../../../wit/dispatch.wit")),
    ("eviction.wit", include_str!("../../../../wit/eviction.wit")),
    ("budget.wit", include_str!("../../../../wit/budget.wit")),
];

/// The Rust SDK: no registry has it, so a folder brings its own.
macro_rules! sdk {
    ($($path:literal)*) => {
        &[$(($path, include_str!(concat!("../../../../policies/sdk/", $path)))),*]
    };
}
const SDK: &[(&str, &str)] = sdk!(
    "Cargo.toml" "build.rs" "src/lib.rs" "src/column.rs" "src/config.rs" "src/contract.rs" "src/eviction.rs"
    "src/inputs.rs" "src/order.rs" "src/policy.rs" "src/request.rs" "src/state.rs" "src/step.rs" "src/budget/mod.rs" "src/budget/thresholds.rs" "src/guest/mod.rs"
    "src/guest/wit.rs" "src/awaited.rs" "src/returns.rs" "src/turnover.rs"
);

/// Templates of the three slots, in the order of [`SlotName::ALL`].
macro_rules! templates {
    ($lang:literal, $extension:literal) => {
        [
            include_str!(concat!("../../templates/", $lang, "/dispatch.", $extension)),
            include_str!(concat!("../../templates/", $lang, "/eviction.", $extension)),
            include_str!(concat!("../../templates/", $lang, "/budget.", $extension)),
        ]
    };
}

/// What differs between the languages in a new folder.
struct Template {
    /// As it is spelt in prose.
    title: &'static str,
    /// Path of the code.
    source: &'static str,
    /// The code for each slot.
    code: [&'static str; 3],
    /// What the slot must allow beyond its defaults.
    deadline_ms: Option<u32>,
    memory_mib: Option<u32>,
    /// The largest batch that keeps the deadline.
    most_candidates: Option<u32>,
}

fn template(lang: Language) -> Template {
    match lang {
        Language::Rust => Template {
            title: "Rust",
            source: "src/lib.rs",
            code: templates!("rust", "rs"),
            deadline_ms: None,
            memory_mib: None,
            most_candidates: None,
        },
        Language::C => Template {
            title: "C",
            source: "policy.c",
            code: templates!("c", "c"),
            deadline_ms: None,
            memory_mib: None,
            most_candidates: None,
        },
        Language::Python => Template {
            title: "Python",
            source: "policy.py",
            code: templates!("python", "py"),
            deadline_ms: Some(10),
            memory_mib: Some(128),
            most_candidates: Some(1024),
        },
        Language::Js => Template {
            title: "JavaScript",
            source: "policy.js",
            code: templates!("js", "js"),
            deadline_ms: Some(10),
            memory_mib: Some(128),
            most_candidates: Some(1024),
        },
    }
}

#[derive(Serialize)]
struct Made {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

pub(super) fn run(args: &NewArgs, json: bool) -> anyhow::Result<()> {
    let NewArgs { name, lang, slot, parent } = args;
    check_name(name).context("NAME")?;
    let folder = parent.join(name);
    ensure!(!folder.exists(), "{}: exists already, expected a new folder", folder.display());
    let files = files(name, *lang, *slot);
    for (path, content) in &files {
        write(&folder.join(path), content)?;
    }
    let made = Made { files: files.into_iter().map(|(path, _)| path).collect(), folder };
    if json {
        return print_json(&made);
    }
    let shown = made.folder.display();
    print_line(&format!("made {shown}: {} files, the code is in {}", made.files.len(), template(*lang).source))?;
    print_line(&format!("test it:  cd {shown} && meridian policy test"))?;
    Ok(print_line(&format!("build it: cd {shown} && meridian policy build"))?)
}

fn write(path: &Path, content: &str) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

fn files(name: &str, lang: Language, slot: SlotName) -> Vec<(PathBuf, String)> {
    let template = template(lang);
    let of_slot = |texts: [&str; 3]| texts[slot as usize].to_owned();
    let filled = |text: &str| {
        let limits = limits(&template);
        let limits = if limits.is_empty() { String::new() } else { format!(" and {}", limits.join(", ")) };
        [
            ("{{name}}", name),
            ("{{Type}}", &type_name(name)),
            ("{{slot}}", slot.label()),
            ("{{Language}}", template.title),
            ("{{source}}", template.source),
            ("{{limits}}", &limits),
        ]
        .into_iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    };
    let cases = templates!("cases", "toml");
    let mut files = vec![
        (MANIFEST.into(), manifest(name, lang, slot, &template)),
        ("README.md".into(), filled(include_str!("../../templates/README.md"))),
        (template.source.into(), filled(&of_slot(template.code))),
        (PathBuf::from("cases").join(format!("{}.toml", slot.label())), of_slot(cases)),
        (".gitignore".into(), "/build\n/target\n".to_owned()),
    ];
    files.extend(WIT.iter().map(|(path, content)| (Path::new("wit").join(path), (*content).to_owned())));
    if lang == Language::Rust {
        files.push(("Cargo.toml".into(), filled(include_str!("../../templates/rust/Cargo.toml"))));
        let vendor = Path::new("vendor").join("sdk");
        files.extend(SDK.iter().map(|(path, content)| (vendor.join(path), (*content).to_owned())));
    }
    files
}

/// `short-first` as `ShortFirst`.
fn type_name(name: &str) -> String {
    let capitalised = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    };
    name.split('-').map(capitalised).collect()
}

/// The limits beyond a slot's defaults, as `meridian.toml` and `policy.toml` have them.
fn limits(template: &Template) -> Vec<String> {
    let deadline = template.deadline_ms.map(|ms| format!("deadline_ms = {ms}"));
    let memory = template.memory_mib.map(|mib| format!("memory_mib = {mib}"));
    deadline.into_iter().chain(memory).collect()
}

fn manifest(name: &str, lang: Language, slot: SlotName, template: &Template) -> String {
    let (lang, slot) = (lang.label(), slot.label());
    let mut text = format!("name = \"{name}\"\nlanguage = \"{lang}\"\nslots = [\"{slot}\"]\n");
    let limits = limits(template);
    if !limits.is_empty() {
        text += &format!("\n# The slot in meridian.toml needs these too.\n[limits]\n{}\n", limits.join("\n"));
    }
    text += "\n[test]\n# The answer about a candidate does not depend on its place in the batch.\norder_independent = true\n";
    if let Some(most) = template.most_candidates {
        text += &format!(
            "# Larger batches may miss the deadline; the default policy then decides them.\nmost_candidates = {most}\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::manifest::Manifest;
    use super::*;

    const LANGUAGES: [Language; 4] = [Language::Rust, Language::C, Language::Python, Language::Js];

    #[test]
    fn every_template_is_filled_and_has_a_manifest() {
        for lang in LANGUAGES {
            for slot in SlotName::ALL {
                let folder = tempfile::tempdir().expect("a folder");
                for (path, content) in files("short-first", lang, slot) {
                    // The SDK is no template.
                    let is_filled = path.starts_with("vendor") || !content.contains("{{");
                    assert!(is_filled, "{}: {content}", path.display());
                    write(&folder.path().join(path), &content).expect("written");
                }
                let manifest = Manifest::of(folder.path()).expect("readable").expect("there");
                assert_eq!((manifest.language, manifest.slots.as_slice()), (lang, &[slot][..]));
                assert!(manifest.test.order_independent);
            }
        }
    }

    #[test]
    fn the_folder_brings_the_whole_sdk_and_contract() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for (folder, embedded) in [("policies/sdk", SDK), ("wit", WIT)] {
            let mut found = Vec::new();
            let mut folders = vec![root.join(folder)];
            while let Some(next) = folders.pop() {
                for entry in std::fs::read_dir(next).expect("a folder").map(|entry| entry.expect("readable").path()) {
                    if entry.is_dir() {
                        folders.push(entry);
                    } else {
                        found.push(entry.strip_prefix(root.join(folder)).expect("below").to_owned());
                    }
                }
            }
            found.sort();
            let mut known: Vec<_> = embedded.iter().map(|(path, _)| PathBuf::from(path)).collect();
            known.sort();
            assert_eq!(known, found, "{folder}");
        }
    }

    #[test]
    fn a_type_has_the_name_in_camel_case() {
        assert_eq!(type_name("short-first2"), "ShortFirst2");
    }
}
