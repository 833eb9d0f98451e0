//! What must hold of a component before it is instantiated, with an error an author can act on.

use wasmtime::Engine;
use wasmtime::component::Component;

use crate::LoadError;

const DISPATCH: &str = "meridian:policy/dispatch@0.1.0";
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

/// Imports nothing, exports what world `dispatch-policy` asks for.
pub(crate) fn world(engine: &Engine, component: &Component) -> Result<(), LoadError> {
    let ty = component.component_type();
    if let Some((import, _)) = ty.imports(engine).next() {
        return Err(LoadError::UnknownImport { import: import.to_owned() });
    }
    for expected in [DISPATCH, LIFECYCLE] {
        if ty.exports(engine).any(|(name, _)| name == expected) {
            continue;
        }
        let interface = expected.split('@').next().unwrap_or(expected);
        let other = ty.exports(engine).find(|(name, _)| name.split('@').next() == Some(interface));
        return Err(match other {
            Some((found, _)) => LoadError::WrongVersion { found: found.to_owned(), expected },
            None => LoadError::MissingExport { expected },
        });
    }
    Ok(())
}
