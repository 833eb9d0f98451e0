//! Engines by name: step times and memory from published figures of GPUs and models.

use super::{EngineConfig, StepModel};

/// A GPU's published figures, of its dense 16-bit tensor operations.
struct Gpu {
    name: &'static str,
    /// Bytes of memory, in units of 10^9.
    memory_gb: f64,
    /// Bytes a second, in units of 10^9.
    bandwidth_gb_s: f64,
    /// Operations a second, in units of 10^12.
    tflops: f64,
}

/// NVIDIA's data sheets: H100 SXM5 (2023), H200 SXM (2024), A100 80GB SXM (2021), L40S (2023), L4 (2023); where a sheet gives
/// tensor operations with sparsity, half of it.
const GPUS: [Gpu; 5] = [
    Gpu { name: "h100", memory_gb: 80.0, bandwidth_gb_s: 3350.0, tflops: 989.0 },
    Gpu { name: "h200", memory_gb: 141.0, bandwidth_gb_s: 4800.0, tflops: 989.0 },
    Gpu { name: "a100", memory_gb: 80.0, bandwidth_gb_s: 2039.0, tflops: 312.0 },
    Gpu { name: "l40s", memory_gb: 48.0, bandwidth_gb_s: 864.0, tflops: 362.0 },
    Gpu { name: "l4", memory_gb: 24.0, bandwidth_gb_s: 300.0, tflops: 121.0 },
];

/// A model's published configuration; weights and KV of two bytes.
struct Model {
    name: &'static str,
    /// In units of 10^9.
    parameters: f64,
    layers: f64,
    /// Attention heads, and heads that have keys and values of their own.
    heads: f64,
    kv_heads: f64,
    head_size: f64,
}

/// From the `config.json` of each model.
const MODELS: [Model; 4] = [
    // DeepSeek-R1-Distill-Qwen-7B
    Model { name: "7b", parameters: 7.62, layers: 28.0, heads: 28.0, kv_heads: 4.0, head_size: 128.0 },
    // Qwen3-8B
    Model { name: "8b", parameters: 8.19, layers: 36.0, heads: 32.0, kv_heads: 8.0, head_size: 128.0 },
    // Qwen3-14B
    Model { name: "14b", parameters: 14.8, layers: 40.0, heads: 40.0, kv_heads: 8.0, head_size: 128.0 },
    // Qwen3-32B
    Model { name: "32b", parameters: 32.8, layers: 64.0, heads: 64.0, kv_heads: 8.0, head_size: 128.0 },
];

/// Share of the bandwidth that decoding reaches: 60 to 85 % are reported for batched inference (Databricks, "LLM Inference
/// Performance Engineering", 2023, model bandwidth utilisation).
const BANDWIDTH_SHARE: f64 = 0.75;
/// Share of the operations that a prefill reaches: 40 to 60 % are reported (Pope et al., arXiv 2211.05102, table 2).
const COMPUTE_SHARE: f64 = 0.5;
/// Of the memory, as vLLM's `gpu_memory_utilization`.
const MEMORY_SHARE: f64 = 0.9;
/// Activations, CUDA graphs and the runtime, in units of 10^9 bytes.
const RUNTIME_GB: f64 = 4.0;
/// vLLM's own time a step with CUDA graphs and for each request in it (scheduling, input preparation, sampling); its
/// V1 engine reports a few milliseconds at hundreds of requests.
const FIXED_MS: f64 = 2.0;
const REQUEST_MS: f64 = 0.008;
const ARRIVAL_MS: f64 = 0.2;
const BYTES: f64 = 2.0;
/// vLLM's defaults for these GPUs.
const BLOCK_TOKENS: u32 = 16;
const MAX_NUM_SEQS: u32 = 256;
const MAX_NUM_BATCHED_TOKENS: u32 = 8192;

/// Every preset: `MODEL-GPU`, those whose weights leave room for KV.
pub fn names() -> Vec<String> {
    MODELS
        .iter()
        .flat_map(|model| GPUS.iter().map(move |gpu| (model, gpu)))
        .filter(|(model, gpu)| kv_blocks(model, gpu) >= 1024)
        .map(|(model, gpu)| format!("{}-{}", model.name, gpu.name))
        .collect()
}

/// The engine of a preset; `None` when there is none of that name.
#[must_use]
pub fn named(name: &str) -> Option<EngineConfig> {
    let (model, gpu) = name.split_once('-')?;
    let model = MODELS.iter().find(|known| known.name == model)?;
    let gpu = GPUS.iter().find(|known| known.name == gpu)?;
    let kv_blocks = kv_blocks(model, gpu);
    if kv_blocks < 1024 {
        return None;
    }
    let bytes_a_ms = gpu.bandwidth_gb_s * 1e6 * BANDWIDTH_SHARE;
    let operations_a_ms = gpu.tflops * 1e9 * COMPUTE_SHARE;
    let parameters = model.parameters * 1e9;
    Some(EngineConfig {
        step: StepModel {
            fixed_ms: FIXED_MS,
            request_ms: REQUEST_MS,
            weights_ms: parameters * BYTES / bytes_a_ms,
            token_ms: 2.0 * parameters / operations_a_ms,
            kv_token_ms: kv_bytes(model) / bytes_a_ms,
            // A product and a sum for the score and for the value.
            attention_ms: 4.0 * model.layers * model.heads * model.head_size / operations_a_ms,
            arrival_ms: ARRIVAL_MS,
        },
        max_num_seqs: MAX_NUM_SEQS,
        max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
        kv_blocks,
        block_tokens: BLOCK_TOKENS,
        kv_token_bytes: kv_bytes(model),
        ..EngineConfig::default()
    })
}

fn kv_bytes(model: &Model) -> f64 {
    2.0 * model.layers * model.kv_heads * model.head_size * BYTES
}

fn kv_blocks(model: &Model, gpu: &Gpu) -> u32 {
    let free_gb = gpu.memory_gb * MEMORY_SHARE - model.parameters * BYTES - RUNTIME_GB;
    (free_gb * 1e9 / (kv_bytes(model) * f64::from(BLOCK_TOKENS))).max(0.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_plausible() {
        assert!(names().len() > 12);
        let engine = named("7b-h100").expect("a preset");
        // 15.2 GB at three quarters of 3.35 TB/s.
        assert!((engine.step.weights_ms - 6.07).abs() < 0.01, "{:?}", engine.step);
        assert!(engine.kv_blocks > 50_000 && engine.kv_blocks < 70_000, "{}", engine.kv_blocks);
        assert!(named("32b-l4").is_none() && named("7b-tpu").is_none());
    }
}
