//! With trusted keys, a component is loaded only with a signature by one of them.

use std::io::Cursor;
use std::path::PathBuf;

use meridian_core::signature::{MAX_SIGNATURE_BYTES, signature_path};
use meridian_wasm::{LoadError, Runtime, SignatureError, TrustedKeys, signature_key_id};
use minisign::KeyPair;
use proptest::prelude::*;

use crate::support;

const FIELD: &str = "policy.trusted_keys";
/// Key, and signature of the four bytes `test` in the legacy format, of minisign's own documentation.
const LEGACY_KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
const LEGACY_SIGNATURE: &str = "untrusted comment: signature from minisign secret key\n\
    RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n\
    trusted comment: timestamp:1555779966\tfile:test\n\
    QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==\n";

struct Key(KeyPair);

impl Key {
    fn new() -> Self {
        Self(KeyPair::generate_unencrypted_keypair().unwrap())
    }

    fn public(&self) -> String {
        self.0.pk.to_base64()
    }

    fn id(&self) -> String {
        format!("{:016X}", u64::from_le_bytes(self.0.pk.keynum().try_into().unwrap()))
    }

    fn sign(&self, content: &[u8]) -> String {
        let comment = Some("timestamp:1\tfile:policy.wasm");
        minisign::sign(None, &self.0.sk, Cursor::new(content), comment, None).unwrap().into_string()
    }
}

fn trusting(entries: &[String]) -> Runtime {
    let keys = TrustedKeys::parse(FIELD, entries, "/nowhere".as_ref()).unwrap();
    Runtime::new(None).unwrap().with_trusted_keys(keys)
}

fn problem(runtime: &Runtime, content: &[u8], signature: &str) -> SignatureError {
    match runtime.load_signed(content, Some(signature)).err().expect("it must be refused") {
        LoadError::BadSignature { problem } => problem,
        other => panic!("{other}"),
    }
}

#[test]
fn a_good_signature_loads_and_says_who_signed() {
    let (key, component) = (Key::new(), support::with_init(""));
    let loaded = trusting(&[key.public()]).load_signed(&component, Some(&key.sign(&component))).unwrap();
    let signer = loaded.signer().unwrap();
    assert_eq!((signer.key_id.as_str(), signer.trusted_comment.as_str()), (&*key.id(), "timestamp:1 file:policy.wasm"));
}

#[test]
fn an_unsigned_component_is_refused_before_it_is_parsed() {
    let key = Key::new();
    for content in [support::with_init(""), b"not even WebAssembly".to_vec(), Vec::new()] {
        let error = trusting(&[key.public()]).load(&content).err().unwrap();
        assert_eq!(error.to_string(), format!("not signed: expected a minisign signature by trusted key {}", key.id()));
    }
}

#[test]
fn what_was_signed_must_be_what_is_loaded() {
    let (key, component) = (Key::new(), support::with_init(""));
    let runtime = trusting(&[key.public()]);
    let signature = key.sign(&component);
    let mismatch = SignatureError::Mismatch { key_id: key.id() };
    for at in [0, component.len() / 2, component.len() - 1] {
        let mut tampered = component.clone();
        tampered[at] ^= 1;
        assert_eq!(problem(&runtime, &tampered, &signature), mismatch);
    }
    let other_file = key.sign(&support::HOSTILE[0].component());
    assert_eq!(problem(&runtime, &component, &other_file), mismatch);
    // The trusted comment is covered too.
    assert_eq!(problem(&runtime, &component, &signature.replace("timestamp:1", "timestamp:2")), mismatch);
}

#[test]
fn a_key_that_is_not_trusted_is_refused_by_its_id() {
    let (key, other, component) = (Key::new(), Key::new(), support::with_init(""));
    let runtime = trusting(&[key.public()]);
    let found = problem(&runtime, &component, &other.sign(&component));
    assert_eq!(found, SignatureError::OtherKey { found: other.id(), trusted: vec![key.id()] });
    assert_eq!(found.to_string(), format!("made with key {}, expected trusted key {}", other.id(), key.id()));
}

#[test]
fn either_of_two_keys_will_do_while_they_are_exchanged() {
    let (old, new, component) = (Key::new(), Key::new(), support::with_init(""));
    let runtime = trusting(&[old.public(), new.public()]);
    for key in [&old, &new] {
        let loaded = runtime.load_signed(&component, Some(&key.sign(&component))).unwrap();
        assert_eq!(loaded.signer().unwrap().key_id, key.id());
    }
    let error = runtime.load(&component).err().unwrap().to_string();
    assert!(error.ends_with(&format!("by one of the trusted keys {}, {}", old.id(), new.id())), "{error}");
}

#[test]
fn a_malformed_signature_is_refused() {
    let (key, component) = (Key::new(), support::with_init(""));
    let runtime = trusting(&[key.public()]);
    let good = key.sign(&component);
    let lines: Vec<_> = good.lines().collect();
    for bad in
        ["", "\n\n\n\n", "signed, honestly", &lines[..3].join("\n"), &good.replace("trusted comment: time", "time")]
    {
        assert_eq!(problem(&runtime, &component, bad), SignatureError::Malformed, "{bad:?}");
    }
    let long = " ".repeat(MAX_SIGNATURE_BYTES + 1);
    assert_eq!(problem(&runtime, &component, &long), SignatureError::TooLarge);
}

#[test]
fn the_legacy_format_is_refused() {
    let runtime = trusting(&[LEGACY_KEY.to_owned()]);
    assert_eq!(problem(&runtime, b"test", LEGACY_SIGNATURE), SignatureError::Legacy);
}

#[test]
fn without_keys_a_stray_signature_is_not_looked_at() {
    let component = support::with_init("");
    let runtime = Runtime::new(None).unwrap();
    assert_eq!(runtime.load_signed(&component, Some("nonsense")).unwrap().signer(), None);
    let folder = temporary("stray");
    std::fs::write(folder.join("policy.wasm"), &component).unwrap();
    std::fs::write(folder.join("policy.wasm.minisig"), "nonsense").unwrap();
    assert_eq!(runtime.load_file(&folder.join("policy.wasm")).unwrap().signer(), None);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_signature_of_a_file_is_beside_it() {
    let (key, component, folder) = (Key::new(), support::with_init(""), temporary("beside"));
    let (file, beside) = (folder.join("policy.wasm"), folder.join("policy.wasm.minisig"));
    assert_eq!(signature_path(&file), beside);
    let runtime = trusting(&[key.public()]);
    let refusal = || runtime.load_file(&file).err().unwrap().to_string();
    std::fs::write(&file, &component).unwrap();
    let expected = format!("a minisign signature in {} by trusted key {}", beside.display(), key.id());
    assert_eq!(refusal(), format!("not signed: expected {expected}"));
    std::fs::write(&beside, key.sign(&component)).unwrap();
    assert_eq!(runtime.load_file(&file).unwrap().signer().unwrap().key_id, key.id());
    std::fs::write(&beside, key.sign(&component).replace('\n', "\r\n")).unwrap();
    assert!(runtime.load_file(&file).is_ok(), "line ends of another system");
    for (bad, reason) in [(vec![0xff; 300], "malformed"), (vec![b'x'; 1 << 20], "more than 16384 bytes")] {
        std::fs::write(&beside, bad).unwrap();
        assert!(refusal().starts_with(&format!("bad signature: {reason}, expected ")), "{}", refusal());
    }
    std::fs::remove_file(&beside).unwrap();
    std::fs::create_dir(&beside).unwrap();
    assert_eq!(refusal(), format!("cannot read {}: not a regular file", beside.display()));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_key_may_be_a_file_relative_to_the_configuration() {
    let (key, component, folder) = (Key::new(), support::with_init(""), temporary("key-file"));
    std::fs::write(folder.join("release.pub"), key.0.pk.to_box().unwrap().into_string()).unwrap();
    std::fs::write(folder.join("bare.pub"), key.public() + "\n").unwrap();
    for entry in ["release.pub", "bare.pub", folder.join("release.pub").to_str().unwrap()] {
        let keys = TrustedKeys::parse(FIELD, &[entry], &folder).unwrap();
        assert_eq!(keys.ids().collect::<Vec<_>>(), [key.id()]);
        let runtime = Runtime::new(None).unwrap().with_trusted_keys(keys);
        assert!(runtime.load_signed(&component, Some(&key.sign(&component))).is_ok());
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_entry_that_is_no_key_is_named_with_its_index() {
    let (key, folder) = (Key::new(), temporary("bad-keys"));
    std::fs::write(folder.join("empty.pub"), "").unwrap();
    std::fs::write(folder.join("long.pub"), vec![b'A'; 5000]).unwrap();
    let secret = key.0.sk.to_box(None).unwrap().to_string();
    std::fs::write(folder.join("secret.key"), secret).unwrap();
    let missing = format!("{}: No such file or directory (os error 2)", folder.join("missing.pub").display());
    let at = |name: &str, reason: &str| format!("{}: {reason}", folder.join(name).display());
    let too_long = at("long.pub", "more than 4096 bytes");
    let (empty, secret) = (at("empty.pub", "not a minisign public key"), at("secret.key", "not a minisign public key"));
    let altered = format!("RW!{}", &key.public()[3..]);
    for (entry, reason) in [
        ("missing.pub", missing.as_str()),
        ("empty.pub", &empty),
        ("long.pub", &too_long),
        ("secret.key", &secret),
        (&altered, "not a minisign public key"),
        ("-----BEGIN PRIVATE KEY-----", "PEM without a public key"),
        ("-----BEGIN PUBLIC KEY-----\n!\n-----END PUBLIC KEY-----", "malformed PEM"),
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", "a public key of another kind"),
    ] {
        let error = TrustedKeys::parse(FIELD, &[key.public(), entry.to_owned()], &folder).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "policy.trusted_keys[1]: {entry:?}: {reason}, expected a minisign public key (56 characters that begin \
                 with RW), a PEM public key (ECDSA P-256), or the path of a file with one of them"
            )
        );
    }
    std::fs::remove_dir_all(folder).unwrap();
}

proptest! {
    #[test]
    fn arbitrary_texts_are_refused_and_never_panic(text in "(?s).{0,300}", lines in "([A-Za-z0-9+/=: ]{0,110}\n){0,6}") {
        let runtime = trusting(&[LEGACY_KEY.to_owned()]);
        for signature in [text.as_str(), &lines] {
            prop_assert!(runtime.load_signed(b"test", Some(signature)).is_err());
            let _ = signature_key_id(signature);
            prop_assert!(TrustedKeys::parse(FIELD, &[signature], "/nowhere".as_ref()).is_err());
        }
    }

    #[test]
    fn an_altered_signature_never_passes(at in 0_usize..1000, byte in any::<u8>()) {
        let (key, component) = (Key::new(), b"any bytes".as_slice());
        let good = key.sign(component);
        let mut altered = good.clone().into_bytes();
        let at = at % altered.len();
        altered[at] = byte;
        let altered = String::from_utf8_lossy(&altered).into_owned();
        // The untrusted comment is what its name says; line ends and base64's padding are not signed either.
        let signed = |text: &str| text.lines().skip(1).map(str::trim_end).map(str::to_owned).collect::<Vec<_>>();
        let error = trusting(&[key.public()]).load_signed(component, Some(&altered)).err().unwrap();
        let passed = matches!(error, LoadError::NotAComponent { .. });
        prop_assert!(!passed || signed(&altered) == signed(&good), "{altered:?}");
    }
}

/// A fresh folder of this process and test.
fn temporary(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("meridian-trust-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be made");
    folder
}
