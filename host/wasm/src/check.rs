//! What must hold of a component before it is instantiated, with an error an author can act on.

use meridian_core::{Budget, Dispatch, Eviction};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::LoadError;
use crate::guest::Calls;
use crate::wit::clip;

const LIFECYCLE: &str = "meridian:policy/lifecycle@0.1.0";

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

/// Imports nothing, exports `lifecycle` and at least one slot; whether it exports a given interface.
pub(crate) fn world(engine: &Engine, component: &Component) -> Result<impl Fn(&str) -> bool + use<>, LoadError> {
    let ty = component.component_type();
    if let Some((import, _)) = ty.imports(engine).next() {
        return Err(LoadError::UnknownImport { import: clip(import.to_owned(), 128) });
    }
    let exports: Vec<String> = ty.exports(engine).map(|(name, _)| name.to_owned()).collect();
    let interface = |name: &str| name.split('@').next().unwrap_or_default().to_owned();
    // Of a known interface, another version than this host's.
    let known = [LIFECYCLE, Dispatch::INTERFACE, Eviction::INTERFACE, Budget::INTERFACE];
    for expected in known {
        let other = exports.iter().find(|name| *name != expected && interface(name) == interface(expected));
        if let (Some(found), false) = (other, exports.iter().any(|name| name == expected)) {
            return Err(LoadError::WrongVersion { found: clip(found.clone(), 128), expected });
        }
    }
    let exports_it = move |interface: &str| exports.iter().any(|name| name == interface);
    if !exports_it(LIFECYCLE) {
        return Err(LoadError::MissingExport { expected: LIFECYCLE });
    }
    if !known[1..].iter().any(|slot| exports_it(slot)) {
        return Err(LoadError::FillsNothing);
    }
    Ok(exports_it)
}
