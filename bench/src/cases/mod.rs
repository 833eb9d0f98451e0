//! Tests of a policy: cases, which are data (`cases/*.toml`), and properties that hold of every policy.
//!
//! A case gives candidates, facts, options and earlier steps, and the expected answer. The host builds the columns from
//! the candidates with its own code, so a case reads like a request and not like a matrix.

mod budget;
mod dispatch;
mod eviction;
mod properties;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use meridian_core::file::read_regular_text;
use meridian_core::text::printable;
use meridian_core::{Policy, SlotName};
use meridian_engine::{Origin, Terms};
use meridian_wasm::GuestKind;
use rand_pcg::Pcg64;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use properties::{DECISION_CANDIDATES, Property, Wanted, properties};

/// Largest file of cases, bytes.
const MAX_CASES_BYTES: u64 = 16 << 20;

/// A slot whose policies can be tested with cases; implemented for every slot.
pub trait CaseKind: GuestKind {
    /// A case, as a file gives it.
    type Case: DeserializeOwned;

    /// The name of a case, and the options of the policy in it.
    fn head(case: &Self::Case) -> (&str, &toml::Table);

    /// Run the case with a policy that was just started.
    ///
    /// # Errors
    /// What was expected and what was found, in one line.
    fn run(case: &Self::Case, policy: Box<dyn Policy<Self>>) -> Result<(), String>;

    /// Facts and columns of candidates that an engine might have, drawn at random.
    fn random(random: &mut Pcg64, inputs: &[Self::Column], candidates: usize) -> (Self::Facts, Vec<f32>);

    /// The answer about each candidate, as text that differs where the bits differ; empty when the policy leaves the batch
    /// to the default.
    fn answers(decision: &Self::Decision) -> Vec<String>;
}

/// A case that was run.
#[derive(Clone, Debug, Serialize)]
pub struct RunCase {
    /// Its file.
    pub file: PathBuf,
    /// Its name.
    pub name: String,
    /// Why it failed; `None` when it holds.
    pub failure: Option<String>,
}

/// Run every case in `folder` that is about slot `K`. Each has a policy of its own. A file is about the slot that its
/// `slot` names, without one about `unnamed`.
///
/// # Errors
/// A file that cannot be read or is no file of cases, by its path and line.
pub fn run_folder<K: CaseKind>(
    folder: &Path,
    unnamed: SlotName,
    origin: &Origin,
    terms: Terms,
) -> anyhow::Result<Vec<RunCase>> {
    let mut run = Vec::new();
    for file in case_files(folder)? {
        for case in read_cases::<K>(&file, unnamed)? {
            let (name, config) = K::head(&case);
            let options = serde_json::to_string(config)?;
            let failure = match origin.policy::<K>(terms, &options) {
                Ok(policy) => K::run(&case, policy).err(),
                Err(error) => Some(error.to_string()),
            };
            run.push(RunCase { file: file.clone(), name: name.to_owned(), failure });
        }
    }
    Ok(run)
}

/// The files of cases in a folder, in the order of their names.
fn case_files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let cannot = || format!("{}: cannot read, expected a folder of TOML files with cases", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The cases of a file that are about slot `K`.
fn read_cases<K: CaseKind>(file: &Path, unnamed: SlotName) -> anyhow::Result<Vec<K::Case>> {
    #[derive(serde::Deserialize)]
    struct Named {
        slot: Option<SlotName>,
    }
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Cases<T> {
        #[serde(rename = "slot")]
        _slot: Option<SlotName>,
        case: Vec<T>,
    }
    let shown = file.display();
    let text = read_regular_text(file, MAX_CASES_BYTES).with_context(|| format!("{shown}: cannot read"))?;
    // The parser quotes the line over several lines; the operator gets one.
    let refused = |error: toml::de::Error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        anyhow::anyhow!("{shown}:{line}: {}", printable(&error.message().replace('\n', "; ")))
    };
    let named: Named = toml::from_str(&text).map_err(refused)?;
    if named.slot.unwrap_or(unnamed) != K::NAME {
        return Ok(Vec::new());
    }
    let cases: Cases<K::Case> = toml::from_str(&text).map_err(refused)?;
    ensure!(!cases.case.is_empty(), "{shown}: no case, expected at least one [[case]]");
    Ok(cases.case)
}

/// Err with what was expected when two values differ.
fn expect<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, expected {expected:?}")) }
}
