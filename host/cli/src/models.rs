use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Subcommand;
use meridian_core::file::read_regular;
use meridian_core::text::printable;
use meridian_core::{FamilyMarker, ModelFamily};
use serde::Serialize;
use serde_json::json;
use tokenizers::Tokenizer;

use crate::{print_json, print_line};

#[derive(Subcommand)]
pub(crate) enum ModelsCommand {
    /// List the known model families
    #[command(after_help = "Example:\n  meridian models list")]
    List,
    /// Encode a family's thinking markers with a tokenizer, and compare the ids with the expected ids
    #[command(after_help = "Example:\n  meridian models resolve --family qwen3 --tokenizer Qwen3-8B/")]
    Resolve {
        /// Resolve this model family only; by default, try every family
        #[arg(long, value_name = "NAME")]
        family: Option<String>,
        /// Use this tokenizer.json, or the one in this model folder
        #[arg(long, value_name = "PATH")]
        tokenizer: PathBuf,
    },
}

pub(crate) fn run(command: ModelsCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ModelsCommand::List => list(json),
        ModelsCommand::Resolve { family: Some(family), tokenizer } => resolve(&family, &tokenizer, json),
        ModelsCommand::Resolve { family: None, tokenizer } => try_all(&tokenizer, json),
    }
}

fn list(json: bool) -> anyhow::Result<()> {
    if json {
        return print_json(&json!({ "families": ModelFamily::all() }));
    }
    let texts = |markers: &[FamilyMarker]| {
        markers.iter().map(|marker| format!("{:?}", marker.text)).collect::<Vec<_>>().join(" or ")
    };
    for family in ModelFamily::all() {
        let markers = format!("{} ... {}", texts(&family.start), texts(&family.end));
        print_line(&format!("{:<17} {markers}  ({})", family.name, family.models.join(", ")))?;
    }
    Ok(())
}

/// Largest tokenizer.json that is read, bytes; those of today's models have 2 to 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;

/// The tokenizer in a file, or in the folder of a model.
pub(crate) fn load(path: &Path) -> anyhow::Result<Tokenizer> {
    let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    let read =
        read_regular(&path, MAX_TOKENIZER_BYTES).with_context(|| format!("{}: cannot be read", path.display()))?;
    let Some(bytes) = read else {
        bail!("{}: is larger than 64 MiB, expected a tokenizer.json of at most that", path.display());
    };
    match guarded(|| Tokenizer::from_bytes(&bytes)) {
        Ok(tokenizer) => Ok(tokenizer),
        Err(reason) => bail!("{}: not a tokenizer.json: {reason}", path.display()),
    }
}

/// The file is not trusted, and the library asserts what it expects of one.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let done = catch_unwind(AssertUnwindSafe(call));
    std::panic::set_hook(hook);
    let reason = match done {
        Ok(Ok(done)) => return Ok(done),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it contradicts itself".to_owned(),
    };
    Err(printable(&reason.replace('\n', " ")).chars().take(300).collect())
}

/// How many tokens a text has, without the special ones that a template adds.
pub(crate) fn count(tokenizer: &Tokenizer, text: &str) -> Result<usize, String> {
    guarded(|| tokenizer.encode_fast(text, false)).map(|encoding| encoding.len())
}

fn encode(tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    match guarded(|| tokenizer.encode(text, false)) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(reason) => bail!("{text:?}: the tokenizer fails: {reason}"),
    }
}

/// A marker as a tokenizer encodes it.
#[derive(Serialize)]
struct Resolved {
    role: &'static str,
    text: String,
    ids: Vec<u32>,
    expected_ids: Vec<u32>,
}

impl Resolved {
    /// None when nothing is expected.
    fn is_expected(&self) -> Option<bool> {
        (!self.expected_ids.is_empty()).then(|| self.ids == self.expected_ids)
    }
}

fn markers_of(family: &ModelFamily, tokenizer: &Tokenizer) -> anyhow::Result<Vec<Resolved>> {
    let roles = [("start", &family.start), ("end", &family.end)];
    let all = roles.into_iter().flat_map(|(role, markers)| markers.iter().map(move |marker| (role, marker)));
    all.map(|(role, FamilyMarker { text, ids: expected_ids })| {
        let ids = encode(tokenizer, text)?;
        ensure!(!ids.is_empty(), "{}: {text:?}: the tokenizer gives no token", family.name);
        Ok(Resolved { role, text: text.clone(), ids, expected_ids: expected_ids.clone() })
    })
    .collect()
}

fn resolve(name: &str, path: &Path, json: bool) -> anyhow::Result<()> {
    let family = ModelFamily::find(name).context("--family")?;
    let tokenizer = load(path)?;
    let markers = markers_of(family, &tokenizer)?;
    if let Some(wrong) = markers.iter().find(|marker| marker.is_expected() == Some(false)) {
        let Resolved { text, ids, expected_ids, .. } = wrong;
        bail!(
            "{name}: {text:?}: the tokenizer gives {ids:?}, expected {expected_ids:?}: not a tokenizer of this family"
        );
    }
    if json {
        return print_json(&json!({ "ok": true, "family": name, "markers": markers }));
    }
    for marker in &markers {
        let verdict = if marker.is_expected().is_some() { "as expected" } else { "nothing expected" };
        print_line(&format!("{:<6} {:<24} {:?}  {verdict}", marker.role, format!("{:?}", marker.text), marker.ids))?;
    }
    Ok(())
}

/// How well a family goes with a tokenizer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Fit {
    /// Expected ids are known and all met.
    Fits,
    /// No ids are known, but the tokenizer has each marker as one token.
    Possible,
    /// No ids are known, and a marker takes several tokens: any tokenizer could.
    Unclear,
    /// An expected id is not met.
    No,
}

impl Fit {
    fn of(markers: &[Resolved]) -> Self {
        let verdicts: Vec<bool> = markers.iter().filter_map(Resolved::is_expected).collect();
        match verdicts.as_slice() {
            [] if markers.iter().all(|marker| marker.ids.len() == 1) => Self::Possible,
            [] => Self::Unclear,
            known if known.iter().all(|holds| *holds) => Self::Fits,
            _ => Self::No,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::Possible => "possible",
            Self::Unclear => "unclear",
            Self::No => "no",
        }
    }
}

#[derive(Serialize)]
struct Tried {
    family: &'static str,
    fit: Fit,
    single_tokens: Vec<String>,
    markers: Vec<Resolved>,
}

fn try_all(path: &Path, json: bool) -> anyhow::Result<()> {
    let tokenizer = load(path)?;
    let mut tried = Vec::new();
    for family in ModelFamily::all() {
        let markers = markers_of(family, &tokenizer)?;
        let single = markers.iter().filter(|marker| marker.ids.len() == 1).map(|marker| marker.text.clone());
        tried.push(Tried { family: &family.name, fit: Fit::of(&markers), single_tokens: single.collect(), markers });
    }
    tried.sort_by_key(|row| row.fit);
    ensure!(
        tried.iter().any(|row| matches!(row.fit, Fit::Fits | Fit::Possible)),
        "{}: no known family fits; set model.think_start and model.think_end",
        path.display()
    );
    if json {
        return print_json(&json!({ "ok": true, "families": tried }));
    }
    for Tried { family, fit, single_tokens, .. } in &tried {
        let single = if single_tokens.is_empty() { "none".to_owned() } else { single_tokens.join(" ") };
        print_line(&format!("{:<8} {family:<17} single tokens: {}", fit.label(), single.escape_debug()))?;
    }
    Ok(())
}
