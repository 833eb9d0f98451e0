//! What the two processes say to each other: a line of JSON, and the component or its compiled form behind it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::LoadError;
use crate::error::LINE_CHARS;
use crate::wit::clip;

/// Longest line. A text of [`LINE_CHARS`] is the longest part of one.
pub(super) const MAX_LINE_BYTES: usize = 16 << 10;

/// On standard input, before the component.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Request {
    /// Who asks. The process ends at once when that is not who started it.
    pub(super) parent: u32,
    pub(super) cpu_s: u64,
    pub(super) memory_bytes: u64,
}

/// On standard output.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// The compiled form follows.
    Compiled(Compiled),
    TooComplex {
        what: String,
        found: u64,
        limit: u64,
    },
    UnknownImport {
        import: String,
    },
    Invalid {
        detail: String,
    },
    Setup {
        detail: String,
    },
    OutOfMemory,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Compiled {
    pub(super) bytes: u64,
    /// Lower-case hexadecimal.
    pub(super) sha256: String,
}

impl From<LoadError> for Answer {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::TooComplex { what, found, limit } => Self::TooComplex { what, found, limit },
            LoadError::UnknownImport { import } => Self::UnknownImport { import },
            LoadError::Invalid { detail } => Self::Invalid { detail },
            LoadError::Setup { detail } => Self::Setup { detail },
            other => Self::Invalid { detail: other.to_string() },
        }
    }
}

impl Answer {
    /// What was compiled. The texts of a refusal are cut again: the process read a hostile component.
    pub(super) fn compiled(self, memory_bytes: u64) -> Result<Compiled, LoadError> {
        let cut = |text| clip(text, LINE_CHARS);
        Err(match self {
            Self::Compiled(compiled) => return Ok(compiled),
            Self::TooComplex { what, found, limit } => LoadError::TooComplex { what: cut(what), found, limit },
            Self::UnknownImport { import } => LoadError::UnknownImport { import: cut(import) },
            Self::Invalid { detail } => LoadError::Invalid { detail: cut(detail) },
            Self::Setup { detail } => LoadError::Setup { detail: cut(detail) },
            Self::OutOfMemory => LoadError::CompileMemory { limit_bytes: memory_bytes },
        })
    }
}

/// The line, its end included.
pub(super) fn line(header: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(header).expect("numbers and texts");
    line.push(b'\n');
    line
}

/// What the line at the beginning says, and the length of that line.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Option<(T, usize)> {
    let end = bytes.iter().take(MAX_LINE_BYTES).position(|byte| *byte == b'\n')?;
    Some((serde_json::from_slice(&bytes[..end]).ok()?, end + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_followed_by_bytes() {
        let request = Request { parent: 7, cpu_s: 120, memory_bytes: 1 << 31 };
        let mut bytes = line(&request);
        let length = bytes.len();
        bytes.extend(b"\0asm\n");
        assert_eq!(parse(&bytes), Some((request, length)));
        assert_eq!(parse::<Request>(&bytes[..length - 1]), None, "no end of the line");
        assert_eq!(parse::<Request>(&[b' '; MAX_LINE_BYTES + 1]), None);
    }

    #[test]
    fn the_longest_text_fits_into_a_line_and_comes_out_bounded() {
        let answer = Answer::Invalid { detail: "\"".repeat(LINE_CHARS) };
        assert!(line(&answer).len() < MAX_LINE_BYTES);
        let hostile = Answer::UnknownImport { import: "a\u{1b}[31m\n".repeat(LINE_CHARS) };
        let refusal = hostile.compiled(0).unwrap_err().to_string();
        assert!(refusal.len() < 2 * LINE_CHARS && !refusal.contains(['\n', '\u{1b}']), "{refusal}");
    }
}
