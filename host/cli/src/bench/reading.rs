//! Command-line options for the formats of traces.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use meridian_bench::limits::{BLOCK_TOKENS, within};
use meridian_bench::trace::{ColumnNames, Format, ReadOptions, ThinkSplit, TokenCount, Trace, Unit, read};

/// How a trace is read.
#[derive(Args, Default)]
pub(crate) struct ReadArgs {
    /// Set the format of the trace; by default, its content decides
    #[arg(long, value_name = "FORMAT", requires = "trace")]
    format: Option<Format>,
    /// Read any CSV or JSON lines by the names of its columns: prompt and output (generated tokens), optionally arrival, think,
    /// tenant, priority, session and blocks: arrival=TIMESTAMP,prompt=ContextTokens,output=GeneratedTokens
    #[arg(long, value_name = "KEY=COLUMN,...", requires = "trace", conflicts_with = "format")]
    columns: Option<ColumnNames>,
    /// Set the unit of arrivals that are numbers, instead of the format's own: s, ms, us, ns
    #[arg(long, value_name = "UNIT", requires = "trace")]
    unit: Option<Unit>,
    /// Set how many tokens a prefix block of the trace has, instead of the format's own
    #[arg(long, value_name = "N", requires = "trace")]
    trace_block_tokens: Option<u32>,
    /// Count the tokens of texts by this tokenizer.json, for traces that have texts
    #[arg(long, value_name = "FILE", requires = "trace")]
    tokenizer: Option<PathBuf>,
    /// Split the generated tokens of a trace without phases into thinking and answer: none, bimodal
    #[arg(long, value_name = "HOW", default_value = "none", requires = "trace")]
    think: String,
    /// Shorten requests that have more tokens than this in total
    #[arg(long, value_name = "TOKENS", requires = "trace")]
    pub(super) clip_tokens: Option<u32>,
}

impl ReadArgs {
    /// By the format's own rules, with thinking split so.
    pub(super) fn thinking(think: &str) -> Self {
        Self { think: think.to_owned(), ..Self::default() }
    }

    /// The trace in a file, or its first `limit` rows.
    pub(crate) fn read(&self, path: &Path, limit: Option<usize>) -> anyhow::Result<Trace> {
        let think = match self.think.as_str() {
            "none" => ThinkSplit::None,
            "bimodal" => ThinkSplit::Bimodal { seed: 1 },
            other => bail!("--think {other}: expected none or bimodal"),
        };
        let block_tokens = self.trace_block_tokens;
        let options = ReadOptions {
            think,
            limit,
            clip_tokens: self.clip_tokens,
            unit: self.unit,
            block_tokens: block_tokens.map(|n| within("--trace-block-tokens", n, &BLOCK_TOKENS)).transpose()?,
            columns: self.columns.clone(),
            count: self.tokenizer.as_deref().map(counting).transpose()?,
        };
        Ok(read(path, self.format, &options)?)
    }

    /// Only how traces are read can be chosen.
    pub(super) fn refuse_for_recording(&self, path: &Path) -> anyhow::Result<()> {
        for (option, is_given) in [
            ("--format", self.format.is_some()),
            ("--columns", self.columns.is_some()),
            ("--unit", self.unit.is_some()),
            ("--trace-block-tokens", self.trace_block_tokens.is_some()),
            ("--tokenizer", self.tokenizer.is_some()),
        ] {
            ensure!(!is_given, "{option}: {}: a recording says its own", path.display());
        }
        match self.think.as_str() {
            "none" => Ok(()),
            "bimodal" => bail!("--think bimodal: a recording knows its phases, expected none"),
            other => bail!("--think {other}: expected none or bimodal"),
        }
    }
}

/// Counts tokens as a tokenizer does, without the special ones that a template adds.
fn counting(path: &Path) -> anyhow::Result<TokenCount> {
    let tokenizer = crate::models::load(path).context("--tokenizer")?;
    Ok(TokenCount::new(move |text| crate::models::count(&tokenizer, text)))
}
