use std::fmt;

use meridian_core::{CONTRACT, CONTRACT_BEFORE, SlotName};

/// A version of the contract that this host speaks.
///
/// ```
/// use meridian_wasm::Contract;
///
/// assert_eq!(Contract::ALL.map(|contract| contract.to_string()), ["0.3.0", "0.2.0"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contract {
    /// That of `wit/`.
    Current,
    /// The one before, `host/wasm/wit-0.2/`. It lacks the columns and the parts of answers that came later, and is the same
    /// otherwise.
    Before,
}

impl Contract {
    /// Both, the newer first.
    pub const ALL: [Self; 2] = [Self::Current, Self::Before];

    /// Version of the WIT package.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::Current => CONTRACT,
            Self::Before => CONTRACT_BEFORE,
        }
    }

    /// Full name of an interface of the package.
    pub(crate) fn interface(self, name: &str) -> String {
        format!("{PACKAGE}/{name}@{}", self.version())
    }
}

impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.version())
    }
}

const PACKAGE: &str = "meridian:policy";

/// The interface that every policy exports.
pub(crate) const LIFECYCLE: &str = "lifecycle";

/// Every interface, without package and version; a slot's has the slot's name.
pub(crate) fn interfaces() -> impl Iterator<Item = &'static str> {
    std::iter::once(LIFECYCLE).chain(SlotName::ALL.map(SlotName::label))
}

/// The interface of the package that an export is, of whatever version.
pub(crate) fn interface_of(export: &str) -> Option<&'static str> {
    let (package, rest) = export.split_once('/')?;
    let name = rest.split('@').next()?;
    interfaces().find(|interface| package == PACKAGE && *interface == name)
}

/// The functions of a component, or where they are: those of one version of the contract.
pub enum Versioned<A, B> {
    /// Of [`Contract::Current`].
    Current(A),
    /// Of [`Contract::Before`].
    Before(B),
}

/// The same expression for the functions of either version.
macro_rules! either {
    ($versioned:expr, $inner:pat => $then:expr) => {
        match $versioned {
            $crate::contract::Versioned::Current($inner) => $then,
            $crate::contract::Versioned::Before($inner) => $then,
        }
    };
}

/// The same expression for either version, whose value differs in type.
macro_rules! each {
    ($versioned:expr, $inner:pat => $then:expr) => {
        match $versioned {
            $crate::contract::Versioned::Current($inner) => $crate::contract::Versioned::Current($then),
            $crate::contract::Versioned::Before($inner) => $crate::contract::Versioned::Before($then),
        }
    };
}

pub(crate) use {each, either};
