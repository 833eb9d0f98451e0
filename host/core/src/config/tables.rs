//! The tables of `meridian.toml`. They also produce the schema, the reference and the range check: a doc comment is the
//! field's description, `range` and `extend` give its range (`x-must-be`: in words, checked elsewhere), and `Default`
//! its default.

use meridian_policy_sdk::Targets;
use meridian_policy_sdk::budget::Thresholds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::effort::ReasoningEfforts;
use super::levels::ServiceLevels;
use super::values::{Auto, Texts};
use crate::SlotKind;
use crate::handoff::{ExpectedTimeHandoff, HandoffPolicy, ThresholdHandoff};

/// The contents of `meridian.toml`. Every field has a default; an unknown field is an error with a suggestion.
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[scheduler]\noutput_tpot_budget_ms = 15").unwrap();
/// assert_eq!(config.scheduler.output_tpot_budget_ms, 15.0);
/// let error = MeridianConfig::from_toml("[scheduler]\noutput_tpot_budget = 15").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "scheduler.output_tpot_budget: unknown field, did you mean `scheduler.output_tpot_budget_ms`?"
/// );
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MeridianConfig {
    /// Targets of the step scheduler, and the limits of thinking.
    pub scheduler: SchedulerConfig,
    /// The signals that show when thinking has converged. Entropies are in bits, here, in the columns of policies and in
    /// reports.
    pub entropy: EntropyConfig,
    /// The KV cache.
    pub kv_memory: KvMemoryConfig,
    /// KV blocks in the memory of other processes. `enabled` and `fabric` are for engines whose KV memory Meridian
    /// manages; vLLM's engines refuse `enabled = true`. The other two fields also serve `meridian handoff`.
    pub disagg: DisaggConfig,
    /// The policy slots.
    pub policy: PolicyConfig,
    /// Metrics and traces.
    pub telemetry: TelemetryConfig,
    /// The admin interface.
    pub admin: AdminConfig,
    /// How the served model marks its thinking.
    pub model: ModelConfig,
    /// What the requests of a class are promised, and which requests these are. A request has the level that its client
    /// names (`meridian_service_level`) if that level is `claimable`, else the one that lists its tenant, else its model,
    /// else its priority, else the one with `default`. Without any level, nothing is promised and nothing changes. NAME
    /// is 1 to 64 of `A-Z a-z 0-9 _ -`; at most 64 levels.
    pub service_levels: ServiceLevels,
}

/// `[scheduler]`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[scheduler]\nmax_defer_ms = 500")?;
/// assert_eq!(config.scheduler.max_defer_ms, 500.0);
/// assert_eq!(config.scheduler.output_tpot_budget_ms, 20.0);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SchedulerConfig {
    /// Step time that policies aim at while an output-phase request runs, milliseconds. A step may take longer.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub output_tpot_budget_ms: f32,
    /// Step time that policies aim at while only thinking requests run, milliseconds. A step may take longer.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub think_tpot_budget_ms: f32,
    /// Largest token budget of a step with only thinking requests, as a multiple of the output-phase token budget.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub think_batch_multiplier: f32,
    /// What ends thinking where nothing else is set. With `"stock"`, nothing does: outputs are vLLM's own, and only a
    /// client's budget ends its thinking. `"guarded"` sets, unless the file sets them itself: `max_think_tokens = 32768`,
    /// `end_loops = true`, `answer_reserve_tokens = 32`, `entropy.rpdi_threshold = 2.0`, `model.eos_guard = true` and
    /// `model.min_answer_tokens = 1`.
    pub thinking: ThinkingDefaults,
    /// Meridian does not end thinking early before this many tokens.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub min_think_tokens: u32,
    /// Meridian ends thinking at this many tokens; at least `min_think_tokens`. The default is longer than any context:
    /// Meridian sets no limit.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub max_think_tokens: u32,
    /// Whether Meridian ends thinking that has become a loop: a text of up to 1,000 tokens that was repeated exactly at
    /// least four times, and for at least 1,024 tokens. Not before `min_think_tokens`.
    pub end_loops: bool,
    /// Tokens of a request with a thinking budget that its thinking leaves for the answer, besides those of the forced
    /// ending: at most a quarter of the request's tokens. 0 leaves none.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub answer_reserve_tokens: u32,
    /// Longest time that a policy may defer a running request, milliseconds. A waiting one is overdue after this time
    /// and four times as many admissions as its place in the queue at its arrival; one with a service level, or held for
    /// `session_wait_ms`, has a bound of its own.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub max_defer_ms: f32,
    /// Longest time that a policy may hold a request because its session has lost its KV blocks and its prompt would take
    /// the place of sessions that soon go on, milliseconds. Many that are held for longer take turns. 0: none is held.
    #[schemars(range(min = 0, max = 86_400_000))]
    pub session_wait_ms: f32,
    /// Whether a waiting request may preempt running requests that the policy ranks behind it, while all seats are
    /// taken.
    pub preempt_for_waiting: bool,
    /// The thresholds of requests whose clients name a `reasoning_effort`. `"unchanged"` leaves a threshold as it is for
    /// other requests.
    pub reasoning_effort: ReasoningEfforts,
}

/// `scheduler.thinking`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let guarded = MeridianConfig::from_toml("[scheduler]\nthinking = 'guarded'\nend_loops = false")?;
/// assert_eq!((guarded.scheduler.max_think_tokens, guarded.scheduler.end_loops), (32_768, false));
/// assert!(guarded.model.eos_guard && !MeridianConfig::default().model.eos_guard);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ThinkingDefaults {
    /// Outputs are vLLM's own.
    #[default]
    Stock,
    /// Thinking has a cap, loops and strays end, and an answer follows.
    Guarded,
}

/// `[entropy]`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[entropy]\neat_max_bits = 1")?;
/// assert_eq!(config.entropy.eat_max_bits, 1.0);
/// assert_eq!(config.entropy.rpdi_window, 512);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct EntropyConfig {
    /// Whether Meridian measures the entropy of the next token, for probes (EAT, with a `probe_suffix`) and deviation
    /// (RPDI).
    pub enabled: bool,
    /// Weight of the newest probe in the moving mean and variance of EAT (entropy after a forced end of thinking,
    /// arXiv 2509.26522).
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub ema_alpha: f64,
    /// Thinking has converged when the moving variance of EAT is below this, bits squared.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub eat_variance_threshold: f64,
    /// Thinking has not converged while the moving mean of EAT is above this, bits. A model can be stable but
    /// uncertain.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub eat_max_bits: f64,
    /// Think tokens between two probes.
    #[schemars(range(min = 1, max = 65_536))]
    pub eat_probe_interval_tokens: u32,
    /// Number of probes before the first probe that may end thinking by EAT.
    #[schemars(range(min = 1, max = 65_536))]
    pub min_probes: u32,
    /// Tokens in the short window of RPDI, the mean entropy of the window over the mean entropy of all tokens. The
    /// definition is that of an independent implementation of arXiv 2603.14251; only the paper's abstract was
    /// available.
    #[schemars(range(min = 1, max = 65_536))]
    pub rpdi_window: u32,
    /// Thinking deviates when RPDI is above this ratio, for example 2. `inf` turns RPDI off; Meridian then measures the
    /// tokens of a request only if its policy reads the index.
    #[schemars(extend("exclusiveMinimum" = 0, "x-may-be-infinite" = true, "x-must-be" = "above 0, or inf"))]
    pub rpdi_threshold: f64,
    /// Where a probe may be due: after any token, or only after a token that ends a line.
    pub probe_at: ProbeAt,
    /// Whether a probe inserts a line break before the end marker.
    pub probe_newline: bool,
    /// Text that a probe appends after the end marker, so that the next token is the answer; up to 64 bytes. Empty
    /// turns off probes and EAT. Directly after the marker, many models begin every answer alike, so the entropy there
    /// carries no information.
    #[schemars(extend("x-must-be" = "at most 64 bytes, and no text of `model.think_end`"))]
    pub probe_suffix: String,
}

/// `entropy.probe_at`
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::ProbeAt;
///
/// let config = MeridianConfig::from_toml("[entropy]\nprobe_at = 'newline'")?;
/// assert_eq!(config.entropy.probe_at, ProbeAt::Newline);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProbeAt {
    /// After any token.
    #[default]
    Interval,
    /// After a token that ends a line.
    Newline,
}

/// `[kv_memory]`
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::Auto;
///
/// let config = MeridianConfig::from_toml("[kv_memory]\ngrowth_blocks = 2")?;
/// assert_eq!(config.kv_memory.growth_blocks, 2.0);
/// assert_eq!(config.kv_memory.evict_dead_thinking, Auto::Auto);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvMemoryConfig {
    /// Whether Meridian manages the engine's KV memory: evictions, preemptions, and the blocks that admission leaves
    /// free.
    pub enabled: bool,
    /// Whether Meridian first evicts the KV blocks of reasoning that later turns do not read. `"auto"` does so when the
    /// model's template strips old reasoning (`model.strips_reasoning`).
    pub evict_dead_thinking: Auto<bool>,
    /// Free KV blocks that admission leaves for the growth of each running request, in total at most a tenth of all
    /// blocks; as many tokens in the larger blocks of a hybrid model. 0 leaves this to the engine. Without free blocks,
    /// the engine admits requests that it must preempt soon after.
    #[schemars(range(min = 0, max = 1024))]
    pub growth_blocks: f64,
}

/// `[disagg]`
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::FabricName;
///
/// let config = MeridianConfig::from_toml("[disagg]\nenabled = true\nfabric = 'tcp'")?;
/// assert_eq!((config.disagg.fabric, config.disagg.offload_threshold_blocks), (FabricName::Tcp, 4));
/// assert!(MeridianConfig::from_toml("[disagg]\nenabled = true").is_err(), "over which fabric?");
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DisaggConfig {
    /// Whether KV blocks may move to a peer and back.
    pub enabled: bool,
    /// How the contents travel: `"tcp"`, `"nixl"` (with its library), `"mooncake"` (with its Python package), or `"none"`.
    pub fabric: FabricName,
    /// Fewest blocks that are worth a transfer; fewer stay, or are computed again.
    #[schemars(range(min = 1, max = 65_536))]
    pub offload_threshold_blocks: u32,
    /// Which requests `meridian handoff` hands over: `"threshold"`, all with so many blocks, or `"expected-time"`, those whose
    /// answer is then expected to end sooner.
    pub policy: HandoffPolicyName,
}

/// `disagg.policy`
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::HandoffPolicyName;
///
/// let config = MeridianConfig::from_toml("[disagg]\npolicy = 'expected-time'")?;
/// assert_eq!(config.disagg.policy, HandoffPolicyName::ExpectedTime);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HandoffPolicyName {
    /// Every request with [`DisaggConfig::offload_threshold_blocks`].
    #[default]
    Threshold,
    /// Those whose answer is expected to end sooner.
    ExpectedTime,
}

impl HandoffPolicyName {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Threshold, Self::ExpectedTime];

    /// As in `meridian.toml`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Threshold => "threshold",
            Self::ExpectedTime => "expected-time",
        }
    }

    /// The policy; requests with fewer than `least_blocks` KV blocks stay.
    #[must_use]
    pub fn policy(self, least_blocks: u32) -> Box<dyn HandoffPolicy> {
        match self {
            Self::Threshold => Box::new(ThresholdHandoff { least_blocks }),
            Self::ExpectedTime => Box::new(ExpectedTimeHandoff { least_blocks }),
        }
    }
}

/// `disagg.fabric`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FabricName {
    /// None.
    #[default]
    None,
    /// In the connection to the peer.
    Tcp,
    /// NVIDIA's NIXL.
    Nixl,
    /// Mooncake's transfer engine.
    Mooncake,
}

/// `[policy]`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[policy.dispatch]\nsource = 'native:fcfs'")?;
/// assert_eq!(config.policy.dispatch.source, "native:fcfs");
/// assert_eq!(config.policy.eviction.source, "native:tiered-lru");
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PolicyConfig {
    /// Whether Meridian reloads a component when its file changes.
    pub watch: bool,
    /// Number of faults within `strike_window_s` that quarantines a version.
    #[schemars(range(min = 1, max = 1000))]
    pub max_strikes: u32,
    /// Time over which Meridian counts faults, seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub strike_window_s: u32,
    /// Folder for fetched and for compiled components, relative to the file's folder; empty for `components` in the
    /// user's cache folder.
    #[schemars(extend("x-must-be" = "a path or empty"))]
    pub cache_dir: String,
    /// Folder for recordings of every decision of the slots, relative to the file's folder; empty for no recording.
    #[schemars(extend("x-must-be" = "a path or empty"))]
    pub record_dir: String,
    /// Most space that the recordings in `record_dir` may take, MiB; Meridian deletes the oldest.
    #[schemars(range(min = 8, max = 1_048_576))]
    pub record_max_mib: u32,
    /// Trusted keys: minisign public keys, PEM public keys (ECDSA P-256, as cosign uses them), or paths of files with
    /// one of them, relative to the file's folder. One of them must have signed each component; empty for no check. PEM
    /// keys verify components from registries only.
    #[schemars(extend("x-must-be" = "without an empty key"))]
    pub trusted_keys: Vec<String>,
    /// The order, the token budget and the token caps of a step.
    pub dispatch: SlotConfig,
    /// The order in which the engine evicts KV blocks.
    pub eviction: SlotConfig,
    /// When thinking ends.
    pub budget: SlotConfig,
}

/// `[policy.dispatch]`, `[policy.eviction]` and `[policy.budget]`.
///
/// Defaults differ by slot: [`SlotConfig::dispatch`], [`SlotConfig::eviction`], [`SlotConfig::budget`].
///
/// ```
/// use meridian_core::{MeridianConfig, SlotConfig};
///
/// let config = MeridianConfig::from_toml("[policy.budget]\nmemory_mib = 8")?;
/// assert_eq!(config.policy.budget, SlotConfig { memory_mib: 8, ..SlotConfig::budget() });
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SlotConfig {
    /// `native:NAME` (dispatch: `balanced`, `output-first`, `fcfs`, `noop`, `priority`, `pascal`, `srpt`, `fair-share`,
    /// `edf`, `qoe`, `mlfq`, `qoserve`, `scorpio`, `jitserve`, `lpm`; eviction: `tiered-lru`, `lru`, `prefix-value`,
    /// `t-lru`, `ttl`, `wa-lru`, `cost-aware`, `next-use`, `noop`; budget: `eat-rpdi`, `fixed-budget`, `patience`,
    /// `deadline-aware`, `eat`, `rpdi`, `deer`, `code-stop`, `noop`), the path of a component relative to the file's folder, or
    /// `oci://HOST/NAME@sha256:DIGEST` for a component in a registry. Until that one is fetched, the native default decides; one in shadow is not compared.
    #[schemars(extend("x-must-be" = "a native policy of the slot, a path, or an oci:// reference with a digest"))]
    pub source: String,
    /// The policy's own options, passed to its `init` as JSON.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    #[schemars(extend("x-must-be" = "what the policy takes, without dates and non-finite numbers"))]
    pub config: toml::Table,
    /// Most processor time that one decision of a component may take, milliseconds.
    #[schemars(range(max = 1000), extend("exclusiveMinimum" = 0))]
    pub deadline_ms: f32,
    /// Most linear memory that a component may use, MiB.
    #[schemars(range(min = 1, max = 1024))]
    pub memory_mib: u32,
    /// With `"active"`, the policy decides. With `"shadow"`, Meridian compares the policy with what decides instead:
    /// `native:fcfs` (vLLM's own order) for dispatch, the native default for the other slots.
    pub mode: SlotMode,
}

/// `policy.SLOT.mode`
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::SlotMode;
///
/// let config = MeridianConfig::from_toml("[policy.dispatch]\nmode = 'shadow'")?;
/// assert_eq!(config.policy.dispatch.mode, SlotMode::Shadow);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SlotMode {
    /// The policy decides.
    Active,
    /// Another policy decides ([`SlotConfig::deciding`]); Meridian compares the policy with it.
    Shadow,
}

/// `[telemetry]`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[telemetry]\nprometheus = ''")?;
/// assert_eq!(config.telemetry.prometheus, "", "off");
/// assert_eq!(config.telemetry.service_name, "meridian");
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TelemetryConfig {
    /// Address of the metrics listener: `IP:port` or `unix:PATH`; empty for off. It serves `/metrics` in the clear, without a
    /// token, to all who reach it: beyond loopback, a firewall should limit them. `{rank}` and `+{rank}` are as in
    /// `admin.listen`.
    #[schemars(extend("x-must-be" = "`IP:port`, `unix:PATH` or empty"))]
    pub prometheus: String,
    /// Tenants whose latencies have series of their own, in order of arrival. Further tenants share the series `other`.
    #[schemars(range(min = 0, max = 256))]
    pub tenants: u32,
    /// Collector of traces (OTLP over HTTP): an `http://` or `https://` URL; empty for off. Meridian adds `/v1/traces` to
    /// a URL without a path. Where this is empty, `OTEL_EXPORTER_OTLP_ENDPOINT` may name a collector.
    #[schemars(extend("x-must-be" = "an `http://` or `https://` URL, or empty"))]
    pub otlp_endpoint: String,
    /// File with PEM certificates that an `https://` collector may present or be signed by, besides those that the system
    /// trusts; empty for none. A relative path starts from the folder of `meridian.toml`.
    #[schemars(extend("x-must-be" = "a path or empty"))]
    pub otlp_ca_file: String,
    /// Name of the service in traces; not empty. Where this is the default, `OTEL_SERVICE_NAME` may give another.
    #[schemars(extend("x-must-be" = "not empty"))]
    pub service_name: String,
}

/// `[admin]`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[admin]\nlisten = 'unix:/run/meridian.sock'")?;
/// assert_eq!(config.admin.listen, "unix:/run/meridian.sock");
/// assert!(MeridianConfig::from_toml("[admin]\nlisten = '0.0.0.0:9465'").is_err(), "neither TLS nor a token");
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdminConfig {
    /// Address of the admin interface: `IP:port` or `unix:PATH`; empty for off. Beyond loopback, it needs `tls_cert_file`,
    /// `tls_key_file` and `token_file`, and reading needs the token as well. `{rank}` in a path is the engine's
    /// data-parallel rank, and `+{rank}` after the port adds it to the port.
    #[schemars(extend("x-must-be" = "`IP:port`, `unix:PATH` or empty; not `telemetry.prometheus`; beyond loopback with TLS and a token"))]
    pub listen: String,
    /// File with the bearer token that changes need, or with up to 64 lines `NAME TOKEN [ROLE]`; empty forbids changes. A role
    /// is `read`, `change` (all but give the engine another policy) or `all`, the default. `{rank}` is the engine's
    /// data-parallel rank.
    #[schemars(extend("x-must-be" = "a path or empty"))]
    pub token_file: String,
    /// File with the PEM certificate of the admin interface, and those that lead to its authority; empty for no TLS. Unix
    /// sockets have no TLS. A relative path starts from the folder of `meridian.toml`.
    #[schemars(extend("x-must-be" = "a path or empty, set exactly when `tls_key_file` is"))]
    pub tls_cert_file: String,
    /// File with the PEM key of the certificate, which no other user may read.
    #[schemars(extend("x-must-be" = "a path or empty, set exactly when `tls_cert_file` is"))]
    pub tls_key_file: String,
    /// File to which each change is appended as a line of JSON, refused ones included; empty for none. `{rank}` is the
    /// engine's data-parallel rank.
    #[schemars(extend("x-must-be" = "a path or empty"))]
    pub audit_log: String,
    /// Most space that `audit_log` may take, MiB. At half of it, the file becomes `audit_log.1` and replaces an older one.
    #[schemars(range(min = 1, max = 1024))]
    pub audit_log_max_mib: u32,
}

/// `[model]`
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[model]\nfamily = 'seed-oss'")?;
/// assert_eq!(config.model.think_end.as_slice(), ["</seed:think>"]);
/// assert!(MeridianConfig::default().model.think_end.is_auto());
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ModelConfig {
    /// A known model family (`meridian models list`), which supplies the fields of this table that are not set; empty
    /// for none.
    #[schemars(extend("x-must-be" = "a known family or empty"))]
    pub family: String,
    /// Text that starts thinking, or a list of alternatives; empty together with `think_end` for a model that does not
    /// think. `"auto"` takes both from vLLM: `--reasoning-config`, else `--reasoning-parser`, else `<think>` and
    /// `</think>`.
    #[schemars(extend("x-must-be" = "\"auto\", empty, or 1 to 8 texts of 1 to 256 bytes"))]
    pub think_start: Texts,
    /// Text that ends thinking, or a list of alternatives.
    #[schemars(extend("x-must-be" = "\"auto\" or empty exactly when `think_start` is, or 1 to 8 texts of 1 to 256 bytes that differ from its"))]
    pub think_end: Texts,
    /// Whether the model may think again after it has begun to answer, within one turn.
    pub resumes: bool,
    /// Whether the chat template leaves the reasoning of earlier turns out of the prompt. `"auto"` uses the family's
    /// value. Without one, the vLLM plugin renders the template to find out, and everything else assumes that the
    /// template keeps the reasoning, so that Meridian never evicts blocks first that a later turn reads again.
    pub strips_reasoning: Auto<bool>,
    /// Text that begins a tool call, or a list of alternatives; empty for those of vLLM's parser, the family, or the
    /// tokenizer. No end of thinking is forced into a call. A template that strips old reasoning keeps the reasoning of a
    /// turn that calls a tool: the next turn, with the tool's result, reads it again.
    #[schemars(extend("x-must-be" = "empty, or 1 to 8 texts of 1 to 256 bytes that differ from the markers of thinking"))]
    pub tool_call: Texts,
    /// Whether a tool call inside the thinking ends it; otherwise an end that is due waits until the call closes. `"auto"`
    /// follows vLLM's reasoning parser.
    pub tool_call_ends_thinking: Auto<bool>,
    /// Text to force when Meridian ends thinking early, an end marker included; empty for the first end marker alone, or the
    /// text of vLLM's `--reasoning-config`.
    #[schemars(extend("x-must-be" = "empty, or at most 4096 bytes with a text of `think_end`"))]
    pub force_phrase: String,
    /// Text that ends thinking when the model generates it inside its thinking, or a list of alternatives; empty for
    /// none.
    #[schemars(extend("x-must-be" = "empty, or 1 to 8 texts of 1 to 256 bytes that differ from the markers of thinking"))]
    pub interrupt: Texts,
    /// Whether an end of sequence inside the thinking becomes the end marker, so that an answer follows.
    pub eos_guard: bool,
    /// Tokens of an answer before which it cannot end, white space and special tokens not counted, where Meridian ended
    /// the thinking or the request has a thinking budget. 0 lets answers be empty.
    #[schemars(range(min = 0, max = 65_536))]
    pub min_answer_tokens: u32,
    /// Where a client's stop strings end the request: `"everywhere"`, as in vLLM, or only in the `"answer"`.
    pub stop_strings: StopStrings,
}

/// `model.stop_strings`
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::StopStrings;
///
/// let config = MeridianConfig::from_toml("[model]\nstop_strings = 'answer'")?;
/// assert_eq!(config.model.stop_strings, StopStrings::Answer);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StopStrings {
    /// In the thinking and in the answer.
    #[default]
    Everywhere,
    /// In the answer only.
    Answer,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        let Thresholds { min_think_tokens, max_think_tokens, .. } = Thresholds::default();
        Self {
            output_tpot_budget_ms: 20.0,
            think_tpot_budget_ms: 80.0,
            think_batch_multiplier: 2.5,
            thinking: ThinkingDefaults::Stock,
            min_think_tokens,
            max_think_tokens,
            end_loops: false,
            answer_reserve_tokens: 0,
            max_defer_ms: 2000.0,
            session_wait_ms: 540_000.0,
            preempt_for_waiting: false,
            reasoning_effort: ReasoningEfforts::default(),
        }
    }
}

impl Default for EntropyConfig {
    fn default() -> Self {
        let thresholds = Thresholds::default();
        Self {
            enabled: true,
            ema_alpha: thresholds.ema_alpha,
            eat_variance_threshold: thresholds.eat_variance_threshold,
            eat_max_bits: thresholds.eat_max_bits,
            eat_probe_interval_tokens: thresholds.eat_probe_interval_tokens,
            min_probes: thresholds.min_probes,
            rpdi_window: thresholds.rpdi_window,
            rpdi_threshold: thresholds.rpdi_threshold,
            probe_at: ProbeAt::Interval,
            probe_newline: false,
            probe_suffix: String::new(),
        }
    }
}

impl Default for KvMemoryConfig {
    fn default() -> Self {
        Self { enabled: true, evict_dead_thinking: Auto::Auto, growth_blocks: 8.0 }
    }
}

impl Default for DisaggConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            fabric: FabricName::None,
            offload_threshold_blocks: 4,
            policy: HandoffPolicyName::Threshold,
        }
    }
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            watch: true,
            max_strikes: 3,
            strike_window_s: 60,
            cache_dir: String::new(),
            record_dir: String::new(),
            record_max_mib: 256,
            trusted_keys: Vec::new(),
            dispatch: SlotConfig::dispatch(),
            eviction: SlotConfig::eviction(),
            budget: SlotConfig::budget(),
        }
    }
}

impl SlotConfig {
    /// The default of `[policy.dispatch]`.
    #[must_use]
    pub fn dispatch() -> Self {
        Self::native("native:balanced", 2.0)
    }

    /// The default of `[policy.eviction]`.
    #[must_use]
    pub fn eviction() -> Self {
        Self::native("native:tiered-lru", 2.0)
    }

    /// The default of `[policy.budget]`.
    #[must_use]
    pub fn budget() -> Self {
        Self::native("native:eat-rpdi", 5.0)
    }

    /// The source that the configuration lets decide.
    ///
    /// ```
    /// use meridian_core::{Dispatch, MeridianConfig};
    ///
    /// let config = MeridianConfig::from_toml("[policy.dispatch]\nmode = 'shadow'")?;
    /// assert_eq!(config.policy.dispatch.source, "native:balanced");
    /// assert_eq!(config.policy.dispatch.deciding::<Dispatch>(), "native:fcfs");
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn deciding<K: SlotKind>(&self) -> &str {
        match self.mode {
            SlotMode::Active => &self.source,
            SlotMode::Shadow => K::BESIDE_SHADOW,
        }
    }

    /// Whether nothing was set for the slot that decides: its default, or a policy in shadow.
    pub(super) fn has_no_say(&self, default: &Self) -> bool {
        self.mode == SlotMode::Shadow || self == default
    }

    fn native(source: &str, deadline_ms: f32) -> Self {
        Self { source: source.into(), config: toml::Table::new(), deadline_ms, memory_mib: 64, mode: SlotMode::Active }
    }
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            prometheus: "127.0.0.1:9464".into(),
            tenants: 16,
            otlp_endpoint: String::new(),
            otlp_ca_file: String::new(),
            service_name: "meridian".into(),
        }
    }
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9465".into(),
            token_file: String::new(),
            tls_cert_file: String::new(),
            tls_key_file: String::new(),
            audit_log: String::new(),
            audit_log_max_mib: 16,
        }
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            family: String::new(),
            think_start: Texts::auto(),
            think_end: Texts::auto(),
            resumes: true,
            strips_reasoning: Auto::Auto,
            tool_call: Texts::default(),
            tool_call_ends_thinking: Auto::Auto,
            force_phrase: String::new(),
            interrupt: Texts::default(),
            eos_guard: false,
            min_answer_tokens: 0,
            stop_strings: StopStrings::Everywhere,
        }
    }
}

impl ThinkingDefaults {
    /// The fields that it sets, unless the file does.
    pub(super) fn fields(self) -> toml::Table {
        let table = |fields: &[(&str, toml::Value)]| {
            toml::Value::Table(fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
        };
        match self {
            Self::Stock => toml::Table::new(),
            Self::Guarded => toml::Table::from_iter([
                (
                    "scheduler".to_owned(),
                    table(&[
                        ("max_think_tokens", 32_768.into()),
                        ("end_loops", true.into()),
                        ("answer_reserve_tokens", 32.into()),
                    ]),
                ),
                ("entropy".to_owned(), table(&[("rpdi_threshold", 2.0.into())])),
                ("model".to_owned(), table(&[("eos_guard", true.into()), ("min_answer_tokens", 1.into())])),
            ]),
        }
    }
}

impl SchedulerConfig {
    /// `max_think_tokens` without a limit.
    pub const NO_LIMIT: u32 = Thresholds::NO_LIMIT;

    /// The part of the table that policies receive.
    #[must_use]
    pub fn targets(&self) -> Targets {
        let Self {
            output_tpot_budget_ms,
            think_tpot_budget_ms,
            think_batch_multiplier,
            thinking: _,
            min_think_tokens: _,
            max_think_tokens: _,
            end_loops: _,
            answer_reserve_tokens: _,
            max_defer_ms,
            session_wait_ms: _,
            preempt_for_waiting: _,
            reasoning_effort: _,
        } = *self;
        Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
    }
}
