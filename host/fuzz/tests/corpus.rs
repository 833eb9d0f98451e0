//! Every checked-in input through its target, in the ordinary build.

use std::fs;
use std::path::Path;
use std::time::Duration;

use meridian_core::{Budget, Dispatch, Eviction};
use meridian_engine::recording::{Recordable, Recording};
use meridian_fuzz::admin::Served;
use meridian_fuzz::{TARGETS, admin, component, recording};
use meridian_wasm::Runtime;

#[test]
fn every_input_is_withstood() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, run) in TARGETS {
        let mut inputs: Vec<_> = fs::read_dir(corpus.join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{name}: no inputs");
        for input in inputs {
            println!("{}", input.display());
            run(&fs::read(&input).unwrap());
        }
    }
}

/// Otherwise their edits would be refused at the first look.
#[test]
fn the_components_that_are_edited_are_of_the_present_contract() {
    let runtime = Runtime::new(None).unwrap();
    for base in component::BASES {
        let loaded = runtime.load(base);
        assert!(loaded.is_ok(), "run `target/release/examples/hostile host/fuzz/corpus/component`: {:?}", loaded.err());
    }
}

/// Otherwise their edits would be refused at the first look.
#[test]
fn the_recordings_that_are_edited_are_of_the_present_format() {
    fn check<K: Recordable>(bytes: &[u8]) {
        let recording = Recording::read(K::NAME.label(), bytes.to_vec())
            .expect("run `target/release/examples/recordings host/fuzz/corpus/recording`");
        assert_eq!((recording.cut(), recording.row_count()), (None, 6));
        let rows = recording.rows::<K>().unwrap().collect::<Result<Vec<_>, _>>().unwrap();
        assert_eq!(rows.iter().map(|row| row.candidates).collect::<Vec<_>>(), [3, 0, 1, 1, 1, 3]);
        let decided = rows.iter().filter(|row| K::is_decided(&row.decision, row.candidates));
        assert_eq!(decided.count(), 3);
    }
    let [dispatch, eviction, budget] = recording::BASES;
    check::<Dispatch>(dispatch);
    check::<Eviction>(eviction);
    check::<Budget>(budget);
}

/// Otherwise nothing would be shown by what does not change.
#[test]
fn a_change_with_the_token_arrives() {
    let serve = |name: &str| {
        let input = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/admin").join(name);
        admin::serve(&fs::read(input).unwrap(), Duration::from_secs(60))
    };
    for (name, change) in [("put", "put"), ("put-chunked", "put"), ("promote", "promote"), ("release", "release")] {
        let Served { changes, received } = serve(name);
        assert_eq!(changes, [change], "{name}");
        assert!(received.starts_with(b"HTTP/1.1 404"), "{name}: {}", String::from_utf8_lossy(&received));
    }
    for (name, code) in
        [("put-no-token", "401"), ("wrong-token", "401"), ("other-host", "403"), ("put-too-large", "413")]
    {
        let Served { changes, received } = serve(name);
        assert!(changes.is_empty(), "{name}: {changes:?}");
        assert!(received.starts_with(format!("HTTP/1.1 {code}").as_bytes()), "{name}");
    }
}
