//! Families of reasoning models, and how each marks its thinking. The files are `models/*.toml`.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::config::{Texts, from_toml, one_line};

/// How a family of models marks its thinking; `models/README.md` documents the fields.
///
/// ```
/// use meridian_core::ModelFamily;
///
/// let family = ModelFamily::find("qwen3").unwrap();
/// assert_eq!(family.start[0].text, "<think>");
/// assert_eq!(family.end[0].ids, [151668]);
/// assert!(ModelFamily::find("qwen4").unwrap_err().to_string().starts_with("\"qwen4\": unknown model family, did you mean"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFamily {
    /// Its name, as in `model.family`; the file is `models/NAME.toml`.
    pub name: String,
    /// Names of some models that it covers.
    pub models: Vec<String>,
    /// Names of vLLM's reasoning parsers for its models. Where vLLM has one of them and it names no texts, the texts of
    /// the family apply; no two families have the same parser.
    #[serde(default)]
    pub parsers: Vec<String>,
    /// Texts that start thinking; alternatives.
    pub start: Vec<FamilyMarker>,
    /// Texts that end thinking; alternatives.
    pub end: Vec<FamilyMarker>,
    /// Whether the templated prompt ends with the start marker.
    pub start_in_prompt: StartInPrompt,
    /// Whether thinking may start again after output in one turn. `None` when that is unknown; Meridian then assumes
    /// that it may.
    #[serde(default)]
    pub resumes: Option<bool>,
    /// Whether the chat template leaves out the reasoning of earlier turns. `None` when that is unknown or varies;
    /// Meridian then assumes that the template keeps it.
    #[serde(default)]
    pub strips_reasoning: Option<bool>,
    /// Texts that begin a tool call, which keeps the reasoning of its turn in the next turn's prompt; empty if none is
    /// known.
    #[serde(default)]
    pub tool_call: Vec<String>,
    /// Text to force when Meridian ends thinking early, an end marker included; empty for the first end marker alone.
    #[serde(default)]
    pub force_phrase: String,
    /// Source of the facts.
    pub evidence: String,
}

/// A marker: its text, and the known token ids in the family's tokenizers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FamilyMarker {
    /// The text.
    pub text: String,
    /// Expected token ids; empty if they are unknown.
    #[serde(default)]
    pub ids: Vec<u32>,
}

/// Whether a prompt ends with the start marker, so that generation begins inside thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartInPrompt {
    /// Always.
    Always,
    /// Never: the model writes the marker.
    Never,
    /// It depends on the model's template or its options.
    Template,
}

macro_rules! bundled {
    ($($name:literal)*) => {
        &[$((concat!("models/", $name, ".toml"), include_str!(concat!("../../../models/", $name, ".toml")))),*]
    };
}

/// File name and text of every family.
const BUNDLED: &[(&str, &str)] = bundled!(
    "cohere-command" "deepseek-r1" "deepseek-v3" "deepseek-v4" "ernie-4.5" "exaone-deep" "gemma-4" "glm-4.5" "gpt-oss"
    "granite" "hunyuan-a13b" "inkling" "k2-horizon" "kimi-k2-thinking" "kimi-k3" "kimi-vl" "magistral" "minimax-m2"
    "minimax-m3" "muse" "muse-glimmer" "nemotron" "phi-4-reasoning" "plamo-3" "qwen3" "qwen3.5" "r1-distill-qwen"
    "seed-oss" "step3"
);

impl ModelFamily {
    /// Every known family, by name.
    #[must_use]
    pub fn all() -> &'static [Self] {
        static ALL: LazyLock<Vec<ModelFamily>> = LazyLock::new(|| {
            let parse = |(file, text): &(&str, &str)| match ModelFamily::from_toml(file, text) {
                Ok(family) => family,
                Err(error) => unreachable!("a test parses every family: {error}"),
            };
            BUNDLED.iter().map(parse).collect()
        });
        &ALL
    }

    /// The family of this name.
    ///
    /// # Errors
    /// [`Error::ModelFamilyUnknown`] with the most similar name and all known names.
    pub fn find(name: &str) -> Result<&'static Self, Error> {
        let all = Self::all();
        all.iter().find(|family| family.name == name).ok_or_else(|| {
            let lower = name.chars().take(64).collect::<String>().to_lowercase();
            let near = all.iter().map(|family| (strsim::damerau_levenshtein(&lower, &family.name), &family.name)).min();
            Error::ModelFamilyUnknown {
                name: name.to_owned(),
                suggestion: near.filter(|(distance, _)| *distance <= 3).map(|(_, name)| name.clone()),
                known: all.iter().map(|family| family.name.as_str()).collect::<Vec<_>>().join(", "),
            }
        })
    }

    /// Parse and check the text of a `models/NAME.toml`; `file` names it in errors.
    ///
    /// # Errors
    /// [`Error::ModelFamilyInvalid`] for the first error.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, Error> {
        let invalid = |field: String, reason: String| Error::ModelFamilyInvalid {
            file: file.to_owned(),
            field: one_line(&field),
            reason: one_line(&reason),
        };
        let family: Self = from_toml(text).map_err(|error| match error {
            Error::ConfigSyntax { field, reason } => invalid(field, reason),
            Error::ConfigValidation { field, value, reason } => invalid(field, format!("{value}: {reason}")),
            other => other,
        })?;
        family.check().map_err(|(field, reason)| invalid(field, reason.into()))?;
        let stem = file.rsplit('/').next().and_then(|name| name.strip_suffix(".toml"));
        if stem != Some(&family.name) {
            return Err(invalid("name".into(), format!("{:?}: must be the name of the file", family.name)));
        }
        Ok(family)
    }

    fn check(&self) -> Result<(), (String, &'static str)> {
        let Self { name, models, parsers, start, end, tool_call, force_phrase, evidence, .. } = self;
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
        let is_parser = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let need = |field: &str, holds: bool, reason| if holds { Ok(()) } else { Err((field.to_owned(), reason)) };
        need("name", !name.is_empty() && name.chars().all(is_plain), "must be of a-z, 0-9, - and .")?;
        need("models", !models.is_empty() && models.iter().all(|model| !model.is_empty()), "must name a model")?;
        need("parsers", parsers.len() <= Texts::MAX, "must hold at most 8 names")?;
        for (index, parser) in parsers.iter().enumerate() {
            let field = format!("parsers[{index}]");
            need(&field, !parser.is_empty() && parser.chars().all(is_parser), "must be of a-z, 0-9 and _")?;
            need(&field, !parsers[..index].contains(parser), "must differ from every other parser")?;
        }
        need("evidence", !evidence.is_empty(), "must not be empty")?;
        let mut texts = BTreeSet::new();
        for (field, markers) in [("start", start), ("end", end)] {
            need(field, (1..=Texts::MAX).contains(&markers.len()), "must hold 1 to 8 markers")?;
            for (index, FamilyMarker { text, ids }) in markers.iter().enumerate() {
                let of = |name: &str| format!("{field}[{index}].{name}");
                need(&of("text"), (1..=Texts::MAX_BYTES).contains(&text.len()), "must have 1 to 256 bytes")?;
                need(&of("text"), texts.insert(text.as_str()), "must differ from every other marker")?;
                need(&of("ids"), ids.len() <= text.len(), "must not be more than the bytes of the text")?;
            }
        }
        need("tool_call", tool_call.len() <= Texts::MAX, "must hold at most 8 texts")?;
        for (index, text) in tool_call.iter().enumerate() {
            let field = format!("tool_call[{index}]");
            need(&field, (1..=Texts::MAX_BYTES).contains(&text.len()), "must have 1 to 256 bytes")?;
            need(&field, texts.insert(text), "must differ from every other marker")?;
        }
        let ends = force_phrase.is_empty() || end.iter().any(|marker| force_phrase.contains(&marker.text));
        need("force_phrase", ends, "must contain the text of an end marker")
    }

    /// The fields of `[model]` that the family supplies.
    pub(crate) fn fields(&self) -> toml::Table {
        let texts = |markers: &[FamilyMarker]| {
            let texts: Texts = markers.iter().map(|marker| marker.text.clone()).collect();
            toml::Value::try_from(texts).expect("texts are plain TOML")
        };
        let mut fields = toml::Table::new();
        fields.insert("think_start".into(), texts(&self.start));
        fields.insert("think_end".into(), texts(&self.end));
        if let Some(resumes) = self.resumes {
            fields.insert("resumes".into(), resumes.into());
        }
        if let Some(strips_reasoning) = self.strips_reasoning {
            fields.insert("strips_reasoning".into(), strips_reasoning.into());
        }
        let tool_call: Texts = self.tool_call.iter().cloned().collect();
        fields.insert("tool_call".into(), toml::Value::try_from(tool_call).expect("texts are plain TOML"));
        fields.insert("force_phrase".into(), self.force_phrase.clone().into());
        fields
    }
}
