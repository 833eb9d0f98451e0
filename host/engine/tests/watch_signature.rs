//! The file watch reads a signature beside the component, and looks again when it comes later.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use meridian_core::signature::MAX_SIGNATURE_BYTES;
use meridian_engine::control::{
    Control, ControlError, FaultEntry, Given, Mode, ProcessStatus, SlotName, StateHandover, SwapReport, Upload, Version,
};
use meridian_engine::watch::{FileWatch, Looked, Pace, WatchedFile};
use sha2::{Digest, Sha256};

/// Takes what is signed "good", and remembers the length of every signature.
#[derive(Default)]
struct Engine {
    signatures: Mutex<Vec<Option<usize>>>,
    /// Who is told of them as well.
    listener: Mutex<Option<Sender<Option<usize>>>>,
}

impl Control for Engine {
    fn status(&self) -> ProcessStatus {
        ProcessStatus::default()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        Vec::new()
    }

    fn put(&self, slot: SlotName, upload: &Upload<'_>, _: Mode) -> Result<SwapReport, ControlError> {
        let Given::Component { bytes: _, signature } = upload.policy else { panic!("{upload:?}") };
        let bytes = signature.map(str::len);
        self.signatures.lock().expect("no test panics").push(bytes);
        if let Some(listener) = &*self.listener.lock().expect("no test panics") {
            let _ = listener.send(bytes);
        }
        if signature != Some("good") {
            return Err(ControlError::Refused("not signed".into()));
        }
        let (active, previous) = (Version::default(), Version::default());
        let state = StateHandover::Stateless;
        Ok(SwapReport { slot, action: "swap".into(), active, previous, state, held_us: 0.0 })
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }
}

#[test]
fn a_signature_that_comes_after_the_component_leads_to_another_look() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("watch-signature");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (file, beside) = (folder.join("policy.wasm"), folder.join("policy.wasm.minisig"));
    std::fs::write(&file, "first").unwrap();
    let engine = Arc::new(Engine::default());
    let first: String = Sha256::digest("first").iter().map(|byte| format!("{byte:02x}")).collect();
    let mut watched = WatchedFile::new(&file, SlotName::Dispatch, Arc::<Engine>::clone(&engine), &first);
    // The slot has this content: a signature that is written or renewed is no change.
    std::fs::write(&beside, "stale").unwrap();
    assert_eq!(watched.look(), Looked::Unchanged);

    std::fs::write(&file, "second version").unwrap();
    assert_eq!(watched.look(), Looked::Refused("not signed".into()), "the signature is still the old one");
    assert_eq!(watched.look(), Looked::Unchanged, "and is not asked about again");
    std::fs::write(&beside, vec![b'x'; 2 * MAX_SIGNATURE_BYTES]).unwrap();
    assert_eq!(watched.look(), Looked::Refused("not signed".into()));
    std::fs::remove_file(&beside).unwrap();
    assert_eq!(watched.look(), Looked::Refused("not signed".into()));
    std::fs::write(&beside, "good").unwrap();
    assert!(matches!(watched.look(), Looked::Swapped(_)));
    std::fs::write(&beside, "good, and renewed").unwrap();
    assert_eq!(watched.look(), Looked::Unchanged);
    let signatures = engine.signatures.lock().unwrap();
    assert_eq!(*signatures, [Some(5), Some(MAX_SIGNATURE_BYTES + 1), None, Some(4)]);
}

/// The component's times tell the next change, and what the links lead to is in other folders, of which no event tells.
#[test]
fn a_signature_that_no_event_tells_of_is_found() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("watch-signature-polled");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("elsewhere")).unwrap();
    let (file, signature) = (folder.join("policy.wasm"), folder.join("elsewhere/signature"));
    symlink(&signature, folder.join("policy.wasm.minisig")).unwrap();
    symlink(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), &file).unwrap();
    let engine = Arc::new(Engine::default());
    let (listener, asked) = channel();
    *engine.listener.lock().unwrap() = Some(listener);
    let watched = WatchedFile::new(&file, SlotName::Dispatch, engine, "");
    let [quiet, patience, poll] = [1, 10, 5].map(Duration::from_millis);
    let watch = FileWatch::start_at(watched, Pace { quiet, patience, poll, ..Pace::default() }).unwrap();
    let hang = Duration::from_secs(20);
    assert_eq!(asked.recv_timeout(hang), Ok(None));
    std::fs::write(&signature, "good").unwrap();
    // It may be read while it is being written.
    while asked.recv_timeout(hang).expect("the signature is found") != Some(4) {}
    drop(watch);
}
