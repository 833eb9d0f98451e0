use std::fmt;
use std::str::FromStr;

use super::TraceError;
use super::error::shown;

/// A file format of recorded requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The project's own: CSV, or JSON lines with the same names.
    Meridian,
    /// Requests as ServeGen generates them (<https://github.com/alibaba/ServeGen>).
    ServeGen,
    /// Azure LLM inference traces of 2023 and 2024 (<https://github.com/Azure/AzurePublicDataset>).
    Azure,
    /// Mooncake's traces with block hashes (<https://github.com/kvcache-ai/Mooncake>, FAST '25), with sessions and delays
    /// as AIPerf has them.
    Mooncake,
    /// Sessions of agents with prefix blocks, replayed in closed loop (as in kv-cache-tester's traces).
    Agentic,
    /// What `vllm bench serve --save-result --save-detailed` writes, also with `--append-result`.
    VllmBench,
    /// Qwen-Bailian: chats with blocks of 16 tokens (<https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon>).
    Bailian,
    /// BurstGPT (<https://github.com/HPMLL/BurstGPT>).
    BurstGpt,
    /// Sessions of GitHub Copilot's agents, 2026 (<https://github.com/Azure/AzurePublicDataset>).
    Copilot,
    /// The `profile_export.jsonl` of AIPerf, a record a request.
    AiperfExport,
    /// Conversations as texts, of which a tokenizer counts the tokens.
    ShareGpt,
    /// Any CSV or JSON lines, with columns that [`super::ColumnNames`] name.
    Columns,
}

impl Format {
    /// All formats, in the order in which messages list them.
    pub const ALL: [Self; 12] = [
        Self::Meridian,
        Self::ServeGen,
        Self::Azure,
        Self::Mooncake,
        Self::Agentic,
        Self::VllmBench,
        Self::Bailian,
        Self::BurstGpt,
        Self::Copilot,
        Self::AiperfExport,
        Self::ShareGpt,
        Self::Columns,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Meridian => "meridian",
            Self::ServeGen => "servegen",
            Self::Azure => "azure",
            Self::Mooncake => "mooncake",
            Self::Agentic => "agentic",
            Self::VllmBench => "vllm-bench",
            Self::Bailian => "bailian",
            Self::BurstGpt => "burstgpt",
            Self::Copilot => "copilot",
            Self::AiperfExport => "aiperf-export",
            Self::ShareGpt => "sharegpt",
            Self::Columns => "columns",
        }
    }

    /// Whether its rows are sessions, which follow each other in closed loop.
    pub fn has_sessions(self) -> bool {
        matches!(self, Self::Agentic | Self::Copilot)
    }

    pub(super) fn known() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = TraceError;

    fn from_str(name: &str) -> Result<Self, TraceError> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| TraceError::UnknownFormat { what: shown(name), known: Self::known() })
    }
}
