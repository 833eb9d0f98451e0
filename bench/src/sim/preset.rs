//! Engines by name: step times and memory from published figures of GPUs and models.

use serde::Serialize;

use super::{EngineConfig, StepModel};

/// A GPU's published figures, of its dense tensor operations.
struct Gpu {
    name: &'static str,
    /// As its driver and vLLM call it.
    device: &'static str,
    /// Memory as its driver reports it, GiB.
    memory_gib: f64,
    /// Bytes a second, in units of 10^9.
    bandwidth_gb_s: f64,
    /// Operations a second with 16 bits and with FP8, in units of 10^12.
    tflops: f64,
    fp8_tflops: f64,
}

/// Data sheets of NVIDIA: H100 SXM5 (2023), H200 SXM (2024), B200 (DGX B200, 2024), A100 80GB SXM (2021), L40S (2023), L4
/// (2023); of AMD: MI300X (2023). Where a sheet gives tensor operations with sparsity, half of it. An A100 has no FP8
/// operations: vLLM computes FP8 weights with 16 bits there.
const GPUS: [Gpu; 7] = [
    gpu("h100", "NVIDIA H100 80GB HBM3", 79.1, 3350.0, 989.0, 1979.0),
    gpu("h200", "NVIDIA H200", 139.8, 4800.0, 989.0, 1979.0),
    gpu("b200", "NVIDIA B200", 178.4, 8000.0, 2250.0, 4500.0),
    gpu("mi300x", "AMD Instinct MI300X", 191.7, 5300.0, 1307.0, 2615.0),
    gpu("a100", "NVIDIA A100-SXM4-80GB", 79.1, 2039.0, 312.0, 312.0),
    gpu("l40s", "NVIDIA L40S", 44.4, 864.0, 362.0, 733.0),
    gpu("l4", "NVIDIA L4", 22.0, 300.0, 121.0, 242.0),
];

const fn gpu(
    name: &'static str,
    device: &'static str,
    memory_gib: f64,
    bandwidth_gb_s: f64,
    tflops: f64,
    fp8_tflops: f64,
) -> Gpu {
    Gpu { name, device, memory_gib, bandwidth_gb_s, tflops, fp8_tflops }
}

/// A model's published configuration; KV of two bytes.
struct Model {
    name: &'static str,
    /// In units of 10^9: of all experts, and those that one token needs.
    parameters: f64,
    active_parameters: f64,
    /// Of a weight: 2, or 1 for FP8.
    weight_bytes: f64,
    layers: f64,
    /// Attention heads, and the sizes of a query and of a value, summed up.
    heads: f64,
    head_sizes: f64,
    /// Numbers that one layer keeps of one token.
    kv_size: f64,
    hidden_size: f64,
    /// GPUs that share the model (tensor parallel).
    gpus: u32,
}

/// A dense model with grouped queries.
const fn dense(name: &'static str, parameters: f64, layers: f64, heads: f64, kv_heads: f64, hidden_size: f64) -> Model {
    Model {
        name,
        parameters,
        active_parameters: parameters,
        weight_bytes: 2.0,
        layers,
        heads,
        head_sizes: 256.0,
        kv_size: 2.0 * kv_heads * 128.0,
        hidden_size,
        gpus: 1,
    }
}

/// From the `config.json` of each model; parameters from its card.
const MODELS: [Model; 7] = [
    // DeepSeek-R1-Distill-Qwen-7B
    dense("7b", 7.62, 28.0, 28.0, 4.0, 3584.0),
    // Qwen3-8B
    dense("8b", 8.19, 36.0, 32.0, 8.0, 4096.0),
    // Qwen3-14B
    dense("14b", 14.8, 40.0, 40.0, 8.0, 5120.0),
    // Qwen3-32B
    dense("32b", 32.8, 64.0, 64.0, 8.0, 5120.0),
    // Qwen3-32B-FP8
    Model { weight_bytes: 1.0, ..dense("32b-fp8", 32.8, 64.0, 64.0, 8.0, 5120.0) },
    // Qwen3-30B-A3B: 8 of 128 experts
    Model { active_parameters: 3.3, ..dense("30b-a3b", 30.5, 48.0, 32.0, 4.0, 2048.0) },
    // DeepSeek-R1, FP8: 8 of 256 experts; multi-head latent attention keeps 512 + 64 numbers, a query has 128 + 64, a
    // value 128
    Model {
        name: "r1",
        parameters: 671.0,
        active_parameters: 37.0,
        weight_bytes: 1.0,
        layers: 61.0,
        heads: 128.0,
        head_sizes: 320.0,
        kv_size: 576.0,
        hidden_size: 7168.0,
        gpus: 8,
    },
];

/// Share of the bandwidth that decoding reaches: 60 to 85 % are reported for batched inference (Databricks, "LLM Inference
/// Performance Engineering", 2023, model bandwidth utilisation).
const BANDWIDTH_SHARE: f64 = 0.75;
/// Share of the operations that a prefill reaches: 40 to 60 % are reported (Pope et al., arXiv 2211.05102, table 2).
const COMPUTE_SHARE: f64 = 0.5;
/// Of the memory: vLLM's default of `gpu_memory_utilization` (vllm/config/cache.py).
pub const MEMORY_SHARE: f64 = 0.92;
/// Activations, CUDA graphs and the runtime, in units of 10^9 bytes.
const RUNTIME_GB: f64 = 4.0;
/// vLLM's own time a step with CUDA graphs and for each request in it (scheduling, input preparation, sampling); its
/// V1 engine reports a few milliseconds at hundreds of requests.
const FIXED_MS: f64 = 2.0;
const REQUEST_MS: f64 = 0.008;
const ARRIVAL_MS: f64 = 0.2;
/// An all-reduce between the GPUs of a server: its latency, and the bytes a second of NVLink (NVIDIA's data sheet of the
/// H200: 900 GB/s both ways), of which each sends and receives 7/4 of the tensor.
const ALL_REDUCE_MS: f64 = 0.01;
const ALL_REDUCE_BYTES_A_MS: f64 = 450e6 / 1.75;
const KV_BYTES: f64 = 2.0;
/// vLLM's default for GPUs.
const BLOCK_TOKENS: u32 = 16;

/// vLLM's defaults of `max_num_seqs` and `max_num_batched_tokens` in its API server, by the memory of the GPU from so many
/// GiB on: vllm/engine/arg_utils.py, `EngineArgs.get_batch_defaults`, versions 0.30 to 0.33.
const DEFAULTS: [(f64, [u32; 2]); 3] = [(160.0, [1024, 16_384]), (70.0, [1024, 8192]), (0.0, [256, 2048])];

fn defaults(gpu: &Gpu) -> [u32; 2] {
    let is_held_back = |least: f64| least == 70.0 && gpu.device.to_lowercase().contains("a100");
    let row = DEFAULTS.iter().find(|(least, _)| gpu.memory_gib >= *least && !is_held_back(*least));
    row.expect("the last row has all").1
}

/// A preset, as `meridian bench engines` lists it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Preset {
    /// `MODEL-GPU`, or `MODEL-8xGPU`.
    pub name: String,
    /// The GPU as vLLM calls it.
    pub device: &'static str,
    /// How many of them share the model.
    pub gpus: u32,
    /// Memory of each, GiB.
    pub memory_gib: f64,
    /// Share of it that vLLM takes.
    pub memory_share: f64,
    /// vLLM's own limit of running requests.
    pub max_num_seqs: u32,
    /// vLLM's own limit of tokens in a step.
    pub max_num_batched_tokens: u32,
    /// Tokens that the KV memory holds.
    pub kv_tokens: u64,
    /// Reading the weights once, milliseconds: a step takes at least that.
    pub weights_ms: f64,
}

/// Every preset whose weights leave room for KV.
#[must_use]
pub fn all() -> Vec<Preset> {
    let pairs = MODELS.iter().flat_map(|model| GPUS.iter().map(move |gpu| (model, gpu)));
    let preset = |(model, gpu): (&Model, &Gpu)| {
        let engine = engine(model, gpu)?;
        Some(Preset {
            name: name(model, gpu),
            device: gpu.device,
            gpus: model.gpus,
            memory_gib: gpu.memory_gib,
            memory_share: MEMORY_SHARE,
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            kv_tokens: u64::from(engine.kv_blocks) * u64::from(BLOCK_TOKENS),
            weights_ms: engine.step.weights_ms,
        })
    };
    pairs.filter_map(preset).collect()
}

fn name(model: &Model, gpu: &Gpu) -> String {
    match model.gpus {
        1 => format!("{}-{}", model.name, gpu.name),
        gpus => format!("{}-{gpus}x{}", model.name, gpu.name),
    }
}

/// The engine of a preset; `None` when there is none of that name.
#[must_use]
pub fn named(given: &str) -> Option<EngineConfig> {
    let mut pairs = MODELS.iter().flat_map(|model| GPUS.iter().map(move |gpu| (model, gpu)));
    let (model, gpu) = pairs.find(|(model, gpu)| name(model, gpu) == given)?;
    engine(model, gpu)
}

/// `None` when the weights leave no room for KV.
fn engine(model: &Model, gpu: &Gpu) -> Option<EngineConfig> {
    let gpus = f64::from(model.gpus);
    let bytes_a_ms = gpu.bandwidth_gb_s * 1e6 * BANDWIDTH_SHARE;
    let tflops = if model.weight_bytes < 2.0 { gpu.fp8_tflops } else { gpu.tflops };
    let operations_a_ms = tflops * 1e9 * COMPUTE_SHARE * gpus;
    let weights = model.parameters * 1e9 * model.weight_bytes;
    // All heads of grouped queries are parted between the GPUs; what latent attention keeps is in each of them.
    let kv_token_bytes = model.layers * model.kv_size * KV_BYTES;
    let free_bytes = gpu.memory_gib * f64::from(1 << 30) * MEMORY_SHARE - weights / gpus - RUNTIME_GB * 1e9;
    let kv_blocks = (free_bytes / (kv_token_bytes * f64::from(BLOCK_TOKENS))).max(0.0) as u32;
    if kv_blocks < 1024 {
        return None;
    }
    let all_reduces = if model.gpus > 1 { 2.0 * model.layers } else { 0.0 };
    let [max_num_seqs, max_num_batched_tokens] = defaults(gpu);
    Some(EngineConfig {
        step: StepModel {
            fixed_ms: FIXED_MS,
            request_ms: REQUEST_MS,
            // A batch of some dozens of requests needs nearly all experts.
            weights_ms: weights / gpus / bytes_a_ms + all_reduces * ALL_REDUCE_MS,
            token_ms: 2.0 * model.active_parameters * 1e9 / operations_a_ms
                + all_reduces * model.hidden_size * 2.0 / ALL_REDUCE_BYTES_A_MS,
            kv_token_ms: kv_token_bytes / bytes_a_ms,
            // A product and a sum for each number of the score and of the value.
            attention_ms: 2.0 * model.layers * model.heads * model.head_sizes / operations_a_ms,
            arrival_ms: ARRIVAL_MS,
            hides_host: true,
        },
        max_num_seqs,
        max_num_batched_tokens,
        kv_blocks,
        block_tokens: BLOCK_TOKENS,
        kv_token_bytes,
        ..EngineConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_plausible() {
        let presets = all();
        assert!(presets.len() > 20, "{presets:?}");
        assert!(presets.iter().all(|preset| named(&preset.name).is_some()));
        let engine = named("7b-h100").expect("a preset");
        // 15.2 GB at three quarters of 3.35 TB/s.
        assert!((engine.step.weights_ms - 6.07).abs() < 0.01, "{:?}", engine.step);
        assert!(engine.kv_blocks > 50_000 && engine.kv_blocks < 70_000, "{}", engine.kv_blocks);
        assert!(named("32b-l4").is_none() && named("7b-tpu").is_none() && named("r1-h200").is_none());
        let flags = |name| named(name).map(|engine| [engine.max_num_seqs, engine.max_num_batched_tokens]);
        assert_eq!(flags("7b-h100"), Some([1024, 8192]));
        assert_eq!(flags("8b-a100"), Some([256, 2048]), "as much memory, but an A100");
        assert_eq!(flags("32b-fp8-b200"), Some([1024, 16_384]));
        assert_eq!(flags("7b-l4"), Some([256, 2048]));
        // 671 GB on eight GPUs at three quarters of 4.8 TB/s, and 122 all-reduces.
        let r1 = named("r1-8xh200").expect("a preset").step;
        assert!((r1.weights_ms - 24.5).abs() < 0.1 && r1.token_ms < 0.03, "{r1:?}");
        // A token of the mixture of experts computes less than one of the dense 7B model.
        assert!(named("30b-a3b-h100").expect("a preset").step.token_ms < engine.step.token_ms);
    }
}
