//! What must hold of a component before it is instantiated, with an error an author can act on.

use meridian_core::{CONTRACT, SlotName};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::LoadError;
use crate::contract::{LIFECYCLE, full_name, interface_of, interfaces};
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

/// Imports nothing, exports `lifecycle` and at least one slot, all of the version that this host speaks. Returns the slots.
pub(crate) fn world(engine: &Engine, component: &Component) -> Result<Vec<SlotName>, LoadError> {
    let ty = component.component_type();
    if let Some((import, _)) = ty.imports(engine).next() {
        return Err(LoadError::UnknownImport { import: clip(import.to_owned(), 128) });
    }
    let exports: Vec<String> = ty.exports(engine).map(|(name, _)| name.to_owned()).collect();
    let exports_it = |interface| exports.contains(&full_name(interface));
    for interface in interfaces().filter(|interface| !exports_it(interface)) {
        if let Some(found) = exports.iter().find(|export| interface_of(export) == Some(interface)) {
            return Err(LoadError::WrongVersion { found: clip(found.clone(), 128), expected: full_name(interface) });
        }
    }
    if !exports_it(LIFECYCLE) {
        return Err(LoadError::MissingExport { expected: full_name(LIFECYCLE) });
    }
    let slots: Vec<_> = SlotName::ALL.into_iter().filter(|slot| exports_it(slot.label())).collect();
    if slots.is_empty() { Err(LoadError::FillsNothing { version: CONTRACT }) } else { Ok(slots) }
}
