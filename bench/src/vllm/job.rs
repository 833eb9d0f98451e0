use std::fmt;
use std::str::FromStr;

use anyhow::Context;
use meridian_core::MeridianConfig;
use serde::Serialize;

use super::EngineSize;
use crate::trace::{Prefix, TraceRequest};

/// The scheduler that is vLLM's own.
pub const STOCK: &str = "stock";

/// A field of `meridian.toml` by its dotted path, and its value: TOML, or else a text.
pub type Setting = (String, String);

/// Type of the model's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// Fast where the processor has it; sums of a batch of one and of many round differently, so greedy outputs part sooner or
    /// later.
    Bfloat16,
    /// Outputs can be compared.
    Float32,
}

impl Default for Dtype {
    /// bfloat16 where this processor computes in it. Elsewhere every number is converted, and a step takes longer than in float32.
    fn default() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        if has_bfloat16(&cpuinfo) { Self::Bfloat16 } else { Self::Float32 }
    }
}

/// Whether the flags of `/proc/cpuinfo` name instructions for bfloat16: of x86-64 or of aarch64.
fn has_bfloat16(cpuinfo: &str) -> bool {
    let flags =
        cpuinfo.lines().find(|line| line.starts_with("flags") || line.starts_with("Features")).unwrap_or_default();
    flags.split_whitespace().any(|flag| ["avx512_bf16", "amx_bf16", "bf16"].contains(&flag))
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "bfloat16" => Ok(Self::Bfloat16),
            "float32" => Ok(Self::Float32),
            _ => Err(format!("{name}: expected bfloat16 or float32")),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Bfloat16 { "bfloat16" } else { "float32" })
    }
}

/// One run of the real engine, as Python is told of it: a JSON object that `python -m meridian.vllm.bench` reads.
#[derive(Clone, Debug, Serialize)]
pub struct Job {
    /// Folder of the model.
    pub model: String,
    /// [`STOCK`], `native:NAME` or the path of a component.
    pub scheduler: String,
    /// Fields of `meridian.toml`, for whoever reads what was recorded.
    pub settings: Vec<Setting>,
    /// `meridian.toml` itself, made of them; `None` for stock vLLM.
    pub meridian_toml: Option<String>,
    /// The engine's size.
    #[serde(flatten)]
    pub engine: JobEngine,
    /// Type of the model's numbers.
    pub dtype: Dtype,
    /// Of the tokens of the prompts.
    pub seed: u64,
    /// Requests come when they are due; else all are there from the start.
    pub realtime: bool,
    /// The prompt of a turn holds the thinking of those before it.
    pub preserves_thinking: bool,
    /// Seconds from an answer to the next turn of its conversation.
    pub gap_s: f64,
    /// Generate random tokens in the place of the model's: schedules and hit rates stay, times mean nothing.
    pub no_model: bool,
    /// Write the tokens of every request.
    pub keeps_outputs: bool,
    /// What is sent.
    pub requests: Vec<JobRequest>,
}

/// The size of an engine, by vLLM's names; what is `None` is left to vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct JobEngine {
    /// KV blocks.
    pub kv_blocks: Option<u32>,
    /// Tokens of a KV block.
    pub block_size: u32,
    /// Most running requests.
    pub max_num_seqs: u32,
    /// Most tokens of a step.
    pub max_num_batched_tokens: u32,
    /// Most tokens of a request.
    pub max_model_len: u32,
}

impl JobEngine {
    /// An engine of this size, for requests of at most so many tokens.
    #[must_use]
    pub fn new(size: EngineSize, max_model_len: u32) -> Self {
        let EngineSize { max_num_seqs, max_num_batched_tokens, max_model_len: _, kv_blocks, block_size } = size;
        Self { kv_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len }
    }
}

/// A request, as Python is told of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobRequest {
    /// Seconds after the start.
    pub arrival_s: f64,
    /// With the template's own tokens.
    pub prompt_tokens: u32,
    /// Without the end marker.
    pub think_tokens: u32,
    /// Of the answer.
    pub output_tokens: u32,
    /// Empty for none.
    pub tenant: String,
    /// Lower is more urgent.
    pub priority: i32,
    /// After arrival; `None` for none.
    pub deadline_ms: Option<f64>,
    /// The conversation that it is a turn of, and which turn.
    pub session: Option<u64>,
    /// See `session`.
    pub turn: Option<u32>,
}

impl From<&TraceRequest> for JobRequest {
    fn from(request: &TraceRequest) -> Self {
        let (session, turn) = match request.prefix {
            Prefix::Session { id, turn } => (Some(id), Some(turn)),
            Prefix::None | Prefix::Blocks { .. } | Prefix::Ranges { .. } => (None, None),
        };
        Self {
            arrival_s: request.arrival_s,
            prompt_tokens: request.prompt_tokens,
            think_tokens: request.think_tokens,
            output_tokens: request.output_tokens,
            tenant: request.tenant.to_string(),
            priority: request.priority,
            deadline_ms: request.deadline_ms.is_finite().then_some(request.deadline_ms),
            session,
            turn,
        }
    }
}

/// The configuration that these settings make; a later one of the same field counts.
///
/// ```
/// use meridian_bench::vllm::meridian_config;
///
/// let settings = [("scheduler.max_defer_ms".to_owned(), "500".to_owned())];
/// assert_eq!(meridian_config(&settings).unwrap().scheduler.max_defer_ms, 500.0);
/// let error = meridian_config(&[("scheduler.max_defer_ms".to_owned(), "soon".to_owned())]).unwrap_err();
/// assert!(error.to_string().starts_with("scheduler.max_defer_ms"), "{error}");
/// ```
///
/// # Errors
/// The field, its value, and what was expected.
pub fn meridian_config(settings: &[Setting]) -> anyhow::Result<MeridianConfig> {
    Ok(MeridianConfig::from_toml(&meridian_toml(settings)?)?)
}

/// The text of the `meridian.toml` that these settings make.
///
/// # Errors
/// A field that is no dotted path.
pub(super) fn meridian_toml(settings: &[Setting]) -> anyhow::Result<String> {
    let mut document = toml::Table::new();
    for (field, text) in settings {
        let value = format!("value = {text}").parse::<toml::Table>().ok().and_then(|mut parsed| parsed.remove("value"));
        let value = value.unwrap_or_else(|| toml::Value::String(text.clone()));
        let (tables, key) = field.rsplit_once('.').with_context(|| format!("{field}: expected SECTION.FIELD"))?;
        let mut table = &mut document;
        for name in tables.split('.') {
            let inner = table.entry(name).or_insert_with(|| toml::Value::Table(toml::Table::new()));
            table = inner.as_table_mut().with_context(|| format!("{field}: {name} is no table"))?;
        }
        table.insert(key.to_owned(), value);
    }
    Ok(toml::to_string(&document)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_without_bfloat16_is_known_by_its_flags() {
        for (flags, has) in [
            ("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n", true),
            ("Features\t: fp asimd bf16\n", true),
            ("flags\t\t: fpu avx2 avx512f\n", false),
            ("model name : bf16\n", false),
            ("", false),
        ] {
            assert_eq!(has_bfloat16(flags), has, "{flags}");
        }
    }
}
