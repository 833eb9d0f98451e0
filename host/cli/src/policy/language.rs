use clap::ValueEnum;
use meridian_core::SlotName;
use serde::{Deserialize, Serialize};

/// A language that policies are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Language {
    /// Rust, with the SDK
    Rust,
    /// C, compiled by the clang of Zig
    C,
    /// Python, with componentize-py
    Python,
    /// JavaScript, with componentize-js
    Js,
}

impl Language {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Rust => "rust",
            Self::C => "c",
            Self::Python => "python",
            Self::Js => "js",
        }
    }
}

/// The world of `wit/world.wit` that exports these slots and nothing else.
pub(crate) fn world(slots: &[SlotName]) -> Option<&'static str> {
    match slots {
        [SlotName::Dispatch] => Some("dispatch-policy"),
        [SlotName::Eviction] => Some("eviction-policy"),
        [SlotName::Budget] => Some("budget-policy"),
        [_, _, _] => Some("policy"),
        _ => None,
    }
}
