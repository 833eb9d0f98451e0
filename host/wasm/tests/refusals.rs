//! What is not a policy component is refused with a reason its author can act on.

mod support;

use meridian_core::MeridianConfig;
use meridian_wasm::{Limits, LoadError, MAX_COMPONENT_BYTES, Runtime};

fn refusal(bytes: &[u8]) -> LoadError {
    Runtime::new(None).expect("wasmtime starts").load(bytes).err().expect("the bytes must be refused")
}

#[test]
fn not_a_component() {
    let core = wat::parse_str("(module)").unwrap();
    assert_eq!(
        refusal(&core).to_string(),
        "not a component: a core WebAssembly module; expected a WebAssembly component (`meridian policy build` makes one)"
    );
    assert!(matches!(refusal(b""), LoadError::NotAComponent { found: "an empty file" }));
    assert!(matches!(refusal(b"\x7fELF"), LoadError::NotAComponent { found: "no WebAssembly header" }));
    assert!(matches!(refusal(b"(component)"), LoadError::NotAComponent { found: "WebAssembly text" }));
}

#[test]
fn corrupt_component() {
    let mut bytes = support::HOSTILE[0].component();
    bytes.truncate(bytes.len() / 2);
    assert!(matches!(refusal(&bytes), LoadError::Invalid { .. }));
    assert!(!refusal(&bytes).to_string().contains('\n'));
}

#[test]
fn unknown_import() {
    let bytes = wat::parse_str(r#"(component (import "wasi:clocks/wall-clock@0.2.0" (instance)))"#).unwrap();
    let error = refusal(&bytes);
    assert_eq!(
        error.to_string(),
        "unknown import `wasi:clocks/wall-clock@0.2.0`: a policy component may import nothing"
    );
}

#[test]
fn missing_world() {
    let error = refusal(&wat::parse_str("(component)").unwrap());
    assert_eq!(error.to_string(), "missing export `meridian:policy/lifecycle@0.1.0`: the component is not a policy");
    let text = r#"(component (instance $i) (export "meridian:policy/lifecycle@0.1.0" (instance $i)))"#;
    let error = refusal(&wat::parse_str(text).unwrap());
    assert!(error.to_string().starts_with("fills no slot: expected an export of `meridian:policy/dispatch@0.1.0`"));
}

#[test]
fn wrong_version() {
    let text = r#"(component (instance $i) (export "meridian:policy/dispatch@0.9.0" (instance $i)))"#;
    let error = refusal(&wat::parse_str(text).unwrap());
    assert!(
        matches!(&error, LoadError::WrongVersion { found, .. } if found == "meridian:policy/dispatch@0.9.0"),
        "{error}"
    );
}

#[test]
fn wrong_types() {
    let text = r#"(component (instance $i)
        (export "meridian:policy/dispatch@0.1.0" (instance $i))
        (export "meridian:policy/lifecycle@0.1.0" (instance $i)))"#;
    let error = refusal(&wat::parse_str(text).unwrap());
    assert!(matches!(&error, LoadError::WrongType { .. }), "{error}");
}

#[test]
fn too_large() {
    let bytes = vec![0; MAX_COMPONENT_BYTES as usize + 1];
    assert!(matches!(refusal(&bytes), LoadError::TooLarge { .. }));
    let folder = temporary("too-large");
    let path = folder.join("large.wasm");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 30).unwrap();
    let error = Runtime::new(None).unwrap().load_file(&path).err().unwrap();
    assert!(matches!(error, LoadError::TooLarge { bytes, .. } if bytes == 1 << 30), "{error}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn unreadable_file() {
    let error = Runtime::new(None).unwrap().load_file("/nowhere/policy.wasm".as_ref()).err().unwrap();
    assert!(error.to_string().starts_with("cannot read /nowhere/policy.wasm: "), "{error}");
    let error = Runtime::new(None).unwrap().load_file("/".as_ref()).err().unwrap();
    assert!(matches!(error, LoadError::Read { .. }), "{error}");
}

#[test]
fn cached_component_is_the_same_and_a_corrupt_cache_is_compiled_again() {
    let folder = temporary("cache");
    let bytes = support::with_init("");
    let start = || {
        let runtime = Runtime::new(Some(folder.join("components"))).unwrap();
        let targets = MeridianConfig::default().scheduler.targets();
        let component = runtime.load(&bytes).unwrap();
        component.dispatch_policy(Limits::default(), targets, "{}").unwrap();
        component.sha256().to_owned()
    };
    let first = start();
    let files = || -> Vec<_> {
        std::fs::read_dir(folder.join("components")).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    assert_eq!(files().len(), 1);
    assert_eq!(start(), first);
    let mut artifact = std::fs::read(&files()[0]).unwrap();
    let middle = artifact.len() / 2;
    artifact[middle] ^= 1;
    std::fs::write(&files()[0], &artifact).unwrap();
    assert_eq!(start(), first);
    assert_ne!(std::fs::read(&files()[0]).unwrap(), artifact, "the corrupt file was replaced");
    for length in [0, 5, 40] {
        std::fs::write(&files()[0], &artifact[..length]).unwrap();
        assert_eq!(start(), first);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[cfg(unix)]
#[test]
fn a_cache_folder_that_others_may_write_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = temporary("shared-cache");
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    Runtime::new(Some(folder.clone())).unwrap().load(&support::with_init("")).unwrap();
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir_all(folder).unwrap();
}

/// A fresh folder of this process and test.
fn temporary(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("meridian-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be made");
    folder
}
