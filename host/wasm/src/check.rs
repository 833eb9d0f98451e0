//! What must hold of a component before it is instantiated, with an error an author can act on.

use meridian_core::SlotName;
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::LoadError;
use crate::contract::{Contract, LIFECYCLE, interface_of, interfaces};
use crate::wit::clip;

/// The eight bytes that every WebAssembly file begins with tell modules (layer 0) from components (layer 1).
pub(crate) fn header(bytes: &[u8]) -> Result<(), LoadError> {
    let found = match bytes {
        [0, b'a', b's', b'm', _, _, 1, 0, ..] => return Ok(()),
        [0, b'a', b's', b'm', _, _, 0, 0, ..] => "a core WebAssembly module",
        [] => "an empty file",
        _ if bytes.starts_with(b"(component") => "WebAssembly text",
        _ => "no WebAssembly header",
    };
    Err(LoadError::NotAComponent { found })
}

/// Imports nothing, exports `lifecycle` and at least one slot, all of one version that this host speaks. Returns the version
/// and the slots.
pub(crate) fn world(engine: &Engine, component: &Component) -> Result<(Contract, Vec<SlotName>), LoadError> {
    let ty = component.component_type();
    if let Some((import, _)) = ty.imports(engine).next() {
        return Err(LoadError::UnknownImport { import: clip(import.to_owned(), 128) });
    }
    let exports: Vec<String> = ty.exports(engine).map(|(name, _)| name.to_owned()).collect();
    let exports_it = |contract: Contract, interface| exports.contains(&contract.interface(interface));
    let contract = Contract::ALL.into_iter().find(|contract| exports_it(*contract, LIFECYCLE));
    // All interfaces of a component are of one version.
    let spoken = contract.map_or(Contract::ALL.to_vec(), |contract| vec![contract]);
    for interface in interfaces() {
        let found = exports.iter().find(|export| interface_of(export) == Some(interface));
        let is_spoken = spoken.iter().any(|contract| exports_it(*contract, interface));
        if let (Some(found), false) = (found, is_spoken) {
            let names: Vec<_> = spoken.iter().map(|contract| format!("`{}`", contract.interface(interface))).collect();
            return Err(LoadError::WrongVersion { found: clip(found.clone(), 128), expected: names.join(" or ") });
        }
    }
    let Some(contract) = contract else {
        return Err(LoadError::MissingExport { expected: Contract::Current.interface(LIFECYCLE) });
    };
    let slots: Vec<_> = SlotName::ALL.into_iter().filter(|slot| exports_it(contract, slot.label())).collect();
    if slots.is_empty() { Err(LoadError::FillsNothing { version: contract.version() }) } else { Ok((contract, slots)) }
}
