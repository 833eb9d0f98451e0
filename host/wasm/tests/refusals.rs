//! What is not a policy component is refused with a reason its author can act on.

use meridian_core::MeridianConfig;
use meridian_wasm::{LoadError, MAX_COMPONENT_BYTES, Runtime};

use crate::support;

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
fn an_import_is_refused_before_anything_is_compiled() {
    // A function that does not return what it says: compiling it finds that first.
    let text = r#"(component (import "wasi:clocks/wall-clock@0.2.0" (instance)) (core module (func (result i32))))"#;
    let error = refusal(&wat::parse_str(text).unwrap());
    assert!(
        matches!(&error, LoadError::UnknownImport { import } if import == "wasi:clocks/wall-clock@0.2.0"),
        "{error}"
    );
    // What a component inside imports is for the one around it to give.
    let text = r#"(component (component (import "inner" (instance))))"#;
    let error = refusal(&wat::parse_str(text).unwrap());
    assert!(matches!(&error, LoadError::MissingExport { .. }), "{error}");
}

#[test]
fn missing_world() {
    let error = refusal(&wat::parse_str("(component)").unwrap());
    assert_eq!(error.to_string(), "missing export `meridian:policy/lifecycle@1.0.0-rc`: the component is not a policy");
    let text = r#"(component (instance $i) (export "meridian:policy/lifecycle@1.0.0-rc" (instance $i)))"#;
    let error = refusal(&wat::parse_str(text).unwrap());
    assert!(error.to_string().starts_with("fills no slot: expected an export of `meridian:policy/dispatch@1.0.0-rc`"));
}

#[test]
fn wrong_version() {
    let of = |exports: &[&str]| {
        let exports: String =
            exports.iter().map(|name| format!(r#"(export "meridian:policy/{name}" (instance $i))"#)).collect();
        refusal(&wat::parse_str(format!("(component (instance $i) {exports})")).unwrap())
    };
    let error = of(&["dispatch@0.9.0"]);
    assert!(
        matches!(&error, LoadError::WrongVersion { found, .. } if found == "meridian:policy/dispatch@0.9.0"),
        "{error}"
    );
    assert!(error.to_string().contains("expected `meridian:policy/dispatch@1.0.0-rc`: "), "{error}");
    // All interfaces are of one version.
    for (lifecycle, dispatch, refused) in
        [("lifecycle@0.2.0", "dispatch@1.0.0-rc", "lifecycle"), ("lifecycle@1.0.0-rc", "dispatch@0.2.0", "dispatch")]
    {
        let error = of(&[lifecycle, dispatch]).to_string();
        let (found, expected) = (format!("{refused}@0.2.0"), format!("{refused}@1.0.0-rc"));
        let wanted = format!("exports `meridian:policy/{found}`, expected `meridian:policy/{expected}`: ");
        assert!(error.starts_with(&wanted), "{error}");
    }
    // Nor is the release the candidate.
    let error = of(&["lifecycle@1.0.0", "dispatch@1.0.0"]);
    assert!(error.to_string().starts_with("exports `meridian:policy/lifecycle@1.0.0`, expected "), "{error}");
    // What is of another package is nobody's business.
    let text = r#"(component (instance $i) (export "someone:else/dispatch@9.0.0" (instance $i)))"#;
    assert!(matches!(refusal(&wat::parse_str(text).unwrap()), LoadError::MissingExport { .. }));
}

#[test]
fn wrong_types() {
    let text = r#"(component (instance $i)
        (export "meridian:policy/dispatch@1.0.0-rc" (instance $i))
        (export "meridian:policy/lifecycle@1.0.0-rc" (instance $i)))"#;
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
        component.dispatch_policy(support::LIMITS, targets, "{}").unwrap();
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

#[cfg(unix)]
#[test]
fn a_compiled_component_that_others_may_write_is_compiled_again() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let folder = temporary("writable-artifact");
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    let load = || drop(Runtime::new(Some(folder.clone())).unwrap().load(&support::with_init("")).unwrap());
    load();
    let artifact = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let inode_and_mode = || {
        let metadata = std::fs::symlink_metadata(&artifact).unwrap();
        (metadata.ino(), metadata.mode() & 0o777)
    };
    let written = inode_and_mode();
    assert_eq!(written.1, 0o600);
    load();
    assert_eq!(inode_and_mode(), written, "a private one is used");
    let mut before = written;
    for mode in [0o666, 0o620, 0o602] {
        std::fs::set_permissions(&artifact, PermissionsExt::from_mode(mode)).unwrap();
        load();
        let after = inode_and_mode();
        assert!(after.0 != before.0 && after.1 == 0o600, "{mode:o}: {after:?} instead of {before:?}");
        before = after;
    }
    // A link could lead to a file of any folder.
    let target = folder.join("elsewhere");
    std::fs::rename(&artifact, &target).unwrap();
    std::os::unix::fs::symlink(&target, &artifact).unwrap();
    load();
    assert!(std::fs::symlink_metadata(&artifact).unwrap().is_file());
    std::fs::remove_dir_all(folder).unwrap();
}

#[cfg(unix)]
#[test]
fn the_cache_is_bounded_and_cleans_up_after_writers_that_were_killed() {
    use std::time::{Duration, SystemTime};
    let folder = temporary("bounded-cache").join("components");
    let runtime = Runtime::new(Some(folder.clone())).unwrap();
    runtime.load(&support::with_init("")).unwrap();
    let place = |name: &str, age_s: u64| {
        let file = std::fs::File::create(folder.join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age_s)).unwrap();
    };
    for age_s in 100..200 {
        place(&format!("{age_s}.cwasm"), age_s);
    }
    place("old.1-0.tmp", 3600);
    place("new.1-1.tmp", 1);
    place("notes.txt", 3600);
    runtime.load(&support::with_init("nop")).unwrap();
    let there = |name: &str| folder.join(name).exists();
    let kept = std::fs::read_dir(&folder)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "cwasm"));
    // Two of them the components.
    assert_eq!(kept.count(), 64);
    assert!(there("161.cwasm") && !there("162.cwasm"), "the oldest go");
    assert!(there("new.1-1.tmp") && there("notes.txt") && !there("old.1-0.tmp"));
    std::fs::remove_dir_all(folder.parent().unwrap()).unwrap();
}

#[test]
fn a_component_that_begins_with_too_much_memory_names_the_limit() {
    let runtime = Runtime::new(None).unwrap();
    let with_pages = |pages: u32| {
        support::component(&support::module("", "unreachable").replacen(
            "\"memory\") 32)",
            &format!("\"memory\") {pages})"),
            1,
        ))
    };
    let component = runtime.load(&with_pages(2000)).unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    let refused = component.dispatch_policy(support::LIMITS, targets, "{}").err().unwrap().to_string();
    let expected = "needs 125 MiB of memory, expected at most memory_mib, 64";
    assert!(refused.ends_with(expected), "{refused}");
    let refused = runtime.load(&with_pages(16_385)).err().unwrap().to_string();
    assert_eq!(refused, "too complex: memory_mib that it begins with: 1025, expected at most 1024");
}

#[cfg(unix)]
#[test]
fn a_pipe_is_refused_at_once() {
    let folder = temporary("pipe");
    let pipe = folder.join("pipe.wasm");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = Runtime::new(None).unwrap().load_file(&pipe).err().unwrap();
    assert_eq!(error.to_string(), format!("cannot read {}: not a regular file", pipe.display()));
    std::fs::remove_dir_all(folder).unwrap();
}

/// A fresh folder of this process and test.
fn temporary(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("meridian-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be made");
    folder
}
