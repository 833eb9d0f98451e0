use std::fmt;
use std::path::Path;
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
    /// Mooncake's traces with block hashes (<https://github.com/kvcache-ai/Mooncake>, FAST '25).
    Mooncake,
    /// Sessions of agents with prefix blocks, replayed in closed loop (as in kv-cache-tester's traces).
    Agentic,
    /// What `vllm bench serve --save-result --save-detailed` writes.
    VllmBench,
}

impl Format {
    /// All formats, in the order in which messages list them.
    pub const ALL: [Self; 6] =
        [Self::Meridian, Self::ServeGen, Self::Azure, Self::Mooncake, Self::Agentic, Self::VllmBench];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Meridian => "meridian",
            Self::ServeGen => "servegen",
            Self::Azure => "azure",
            Self::Mooncake => "mooncake",
            Self::Agentic => "agentic",
            Self::VllmBench => "vllm-bench",
        }
    }

    /// The format that a file's suffix and first line speak for; the line may be cut short.
    ///
    /// ```
    /// use meridian_bench::trace::Format;
    ///
    /// let header = "TIMESTAMP,ContextTokens,GeneratedTokens";
    /// assert_eq!(Format::detect("azure.csv".as_ref(), header), Some(Format::Azure));
    /// ```
    pub fn detect(path: &Path, first_line: &str) -> Option<Self> {
        let line = first_line.trim_start_matches('\u{feff}').trim();
        if line.starts_with('{') {
            let key = |name: &str| line.contains(&format!("\"{name}\""));
            return if key("arrival_s") {
                Some(Self::Meridian)
            } else if key("requests") && key("block_size") {
                Some(Self::Agentic)
            } else if key("hash_ids") || (key("input_length") && key("output_length") && key("timestamp")) {
                Some(Self::Mooncake)
            } else if key("timestamp") || key("arrival_time") {
                Some(Self::ServeGen)
            } else if suffix(path, &["json"]) || key("input_lens") || key("endpoint_type") {
                Some(Self::VllmBench)
            } else {
                None
            };
        }
        let columns: Vec<&str> = line.split(',').map(|name| name.trim().trim_matches('"')).collect();
        let has = |name: &str| columns.contains(&name);
        if has("TIMESTAMP") && has("ContextTokens") {
            Some(Self::Azure)
        } else if has("arrival_s") && has("prompt_tokens") && has("output_tokens") {
            Some(Self::Meridian)
        } else if super::servegen::ARRIVAL.iter().any(|name| has(name))
            && super::servegen::PROMPT.iter().any(|name| has(name))
        {
            Some(Self::ServeGen)
        } else {
            None
        }
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

/// Whether a file is JSON lines rather than CSV.
pub(super) fn json_lines(path: &Path) -> bool {
    suffix(path, &["jsonl", "ndjson"])
}

fn suffix(path: &Path, known: &[&str]) -> bool {
    path.extension().is_some_and(|given| known.iter().any(|name| given.eq_ignore_ascii_case(name)))
}
