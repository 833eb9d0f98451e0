use meridian_core::{CONTRACT, SlotName};

const PACKAGE: &str = "meridian:policy";

/// The interface that every policy exports.
pub(crate) const LIFECYCLE: &str = "lifecycle";

/// Every interface, without package and version; a slot's has the slot's name.
pub(crate) fn interfaces() -> impl Iterator<Item = &'static str> {
    std::iter::once(LIFECYCLE).chain(SlotName::ALL.map(SlotName::label))
}

/// Full name of an interface of the package.
pub(crate) fn full_name(interface: &str) -> String {
    format!("{PACKAGE}/{interface}@{CONTRACT}")
}

/// The interface of the package that an export is, of whatever version.
pub(crate) fn interface_of(export: &str) -> Option<&'static str> {
    let (package, rest) = export.split_once('/')?;
    let name = rest.split('@').next()?;
    interfaces().find(|interface| package == PACKAGE && *interface == name)
}
