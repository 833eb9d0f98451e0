//! A calibrated engine as a file.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use meridian_core::config;
use serde::{Deserialize, Serialize};

use crate::limits::{BATCHED_TOKENS, BLOCK_TOKENS, KV_BLOCKS, NUM_SEQS, within};
use crate::read::{MAX_TOML_BYTES, read_text};
use crate::sim::{EngineConfig, StepModel};

/// A calibrated engine, as `--engine FILE.toml` reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineFile {
    /// Parameters of the step time, milliseconds; see [`StepModel`].
    pub step: std::collections::BTreeMap<String, f64>,
    /// Most running requests.
    pub max_num_seqs: u32,
    /// Most tokens of a step.
    pub max_num_batched_tokens: u32,
    /// KV blocks.
    pub kv_blocks: u32,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Bytes of the KV of one token, for handoffs; 0 if not known.
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub kv_token_bytes: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_unknown(bytes: &f64) -> bool {
    *bytes == 0.0
}

impl EngineFile {
    /// What is written of an engine.
    #[must_use]
    pub fn of(engine: &EngineConfig) -> Self {
        Self {
            step: engine.step.by_name(),
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            kv_blocks: engine.kv_blocks,
            block_tokens: engine.block_tokens,
            kv_token_bytes: engine.kv_token_bytes,
        }
    }

    /// Read one.
    ///
    /// # Errors
    /// The file, the field, the value and what was expected.
    pub fn read(path: &Path) -> anyhow::Result<EngineConfig> {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let text = read_text(path, MAX_TOML_BYTES)?;
        let file: Self = config::from_toml(&text).with_context(|| name.clone())?;
        let mut values = [0.0; 7];
        for (key, value) in &file.step {
            let Some(position) = StepModel::NAMES.iter().position(|known| known == key) else {
                bail!("{name}: step.{key}: unknown field, expected one of {}", StepModel::NAMES.join(", "));
            };
            ensure!(
                value.is_finite() && *value >= 0.0,
                "{name}: step.{key}: {value}: expected a time of at least 0 ms"
            );
            values[position] = *value;
        }
        ensure!(values[..4].iter().any(|value| *value > 0.0), "{name}: step: all 0, expected steps that take time");
        let kv_token_bytes = file.kv_token_bytes;
        ensure!(
            (0.0..=1e9).contains(&kv_token_bytes),
            "{name}: kv_token_bytes: {kv_token_bytes}: expected 0 to 1e9 bytes"
        );
        let within = |field: &str, value: u32, limits| within(&format!("{name}: {field}:"), value, limits);
        Ok(EngineConfig {
            step: StepModel::from_values(values),
            max_num_seqs: within("max_num_seqs", file.max_num_seqs, &NUM_SEQS)?,
            max_num_batched_tokens: within("max_num_batched_tokens", file.max_num_batched_tokens, &BATCHED_TOKENS)?,
            kv_blocks: within("kv_blocks", file.kv_blocks, &KV_BLOCKS)?,
            block_tokens: within("block_tokens", file.block_tokens, &BLOCK_TOKENS)?,
            kv_token_bytes,
            ..EngineConfig::default()
        })
    }
}
