//! Components in a registry: `meridian policy push` and `pull`, and an engine whose configuration names one. The registry is
//! Debian's docker-registry; the faults are those of a proxy before it. One file, because each test starts both and a second
//! binary of tests would link the whole command again.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "support/registry.rs"]
mod registry_support;
mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use meridian_core::oci::OciReference;
use meridian_core::signature::FetchedComponent;
use meridian_core::{EngineFacts, MeridianConfig, SlotName};
use meridian_engine::control::{ControlError, Given, Mode, Upload};
use meridian_engine::{Components, Engine, FetchPace, Settings};
use meridian_registry::{Limits, Problem, Registry, RegistryError, Signatures};
use meridian_wasm::{TrustedKeys, sha256_of};
use registry_support::{DockerRegistry, Fault, Login, PASSWORD, Proxy, USER, docker_config};
use serde_json::{Value, json};
use support::{Done, meridian_with};

/// Attempts follow each other at once.
const QUICK: Limits = Limits {
    connect: Duration::from_secs(30),
    silence: Duration::from_secs(30),
    total: Duration::from_secs(60),
    attempts: 3,
    backoff: Duration::ZERO,
    longest_backoff: Duration::ZERO,
};

/// A registry, a proxy before it, and a folder with a login for the proxy.
struct Site {
    folder: PathBuf,
    docker: PathBuf,
    registry: DockerRegistry,
    proxy: Proxy,
}

impl Site {
    fn new(name: &str, login: Login) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("registry-{name}"));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let registry = DockerRegistry::start(&folder.join("registry"), login);
        let proxy = Proxy::before(Some(registry.address));
        let docker = docker_config(&folder, &[proxy.address], USER, PASSWORD);
        Self { folder, docker, registry, proxy }
    }

    /// With the login of `docker`.
    fn meridian(&self, args: &[&str]) -> Done {
        meridian_with(&self.folder, &[("DOCKER_CONFIG", self.docker.to_str().unwrap())], args)
    }

    fn succeeds(&self, args: &[&str]) -> Value {
        let done = self.meridian(&[&["--json"], args].concat());
        assert_eq!(done.code, 0, "{}", done.stderr);
        serde_json::from_str(&done.stdout).unwrap()
    }

    /// The line that a failure prints.
    fn fails(&self, args: &[&str]) -> String {
        let done = self.meridian(args);
        assert_eq!((done.code, done.stdout.as_str(), done.stderr.lines().count()), (1, "", 1), "{}", done.stderr);
        done.stderr.trim().to_owned()
    }

    /// `NAME:TAG`, or `NAME@DIGEST`, at the proxy.
    fn at(&self, named: &str) -> String {
        format!("oci://{}/{named}", self.proxy.address)
    }

    /// Push a shipped component; returns its source.
    fn push(&self, policy: &str) -> String {
        let pushed = self.succeeds(&["policy", "push", &shipped(policy), &self.at(&format!("team/{policy}:1"))]);
        pushed["source"].as_str().unwrap().to_owned()
    }
}

fn shipped(policy: &str) -> String {
    let path = format!("{}/../../target/policies/{policy}.wasm", env!("CARGO_MANIFEST_DIR"));
    assert!(Path::new(&path).is_file(), "{path}: run `make policies` first");
    path
}

fn bytes_of(policy: &str) -> Vec<u8> {
    std::fs::read(shipped(policy)).unwrap()
}

fn pull(limits: Limits, source: &str) -> Result<FetchedComponent, RegistryError> {
    Registry::new(limits).pull(&OciReference::parse(source).unwrap(), Signatures::Ignore)
}

#[test]
fn what_is_pushed_is_pulled_by_tag_and_by_digest() {
    let site = Site::new("round", Login::Wanted);
    let source = site.push("srpt");
    assert!(source.starts_with(&site.at("team/srpt@sha256:")), "{source}");
    assert_eq!(site.push("srpt"), source, "the same bytes have the same digest");
    for reference in [site.at("team/srpt:1"), source.clone(), source.replace('@', ":another@")] {
        let file = site.folder.join("pulled.wasm");
        let _ = std::fs::remove_file(&file);
        let pulled = site.succeeds(&["policy", "pull", &reference, "-o", file.to_str().unwrap()]);
        assert_eq!(std::fs::read(&file).unwrap(), bytes_of("srpt"));
        assert_eq!(pulled["source"], source);
        assert_eq!(pulled["sha256"], sha256_of(&bytes_of("srpt")));
    }
    let unnamed = site.succeeds(&["policy", "pull", &source]);
    assert_eq!(unnamed["file"], "srpt.wasm");
    assert!(site.folder.join("srpt.wasm").is_file() && !site.folder.join("srpt.wasm.minisig").exists());
    let inspected = site.succeeds(&["policy", "inspect", &source]);
    assert_eq!((&inspected["name"], &inspected["file"]), (&json!("srpt"), &json!(source)));
    assert_eq!(site.succeeds(&["policy", "check", &source])["name"], "srpt");
    // The layout is that of wkg.
    let manifest = site.manifest("team/srpt", "1");
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.wasm.config.v0+json");
    assert_eq!(manifest["layers"][0]["mediaType"], "application/wasm");
    let config = site.blob("team/srpt", manifest["config"]["digest"].as_str().unwrap());
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["os"], &config["architecture"]), (&json!("wasip2"), &json!("wasm")));
    assert_eq!(config["layerDigests"], json!([manifest["layers"][0]["digest"]]));
    assert!(config["component"]["exports"][0].as_str().unwrap().starts_with("meridian:"), "{config}");
}

#[test]
fn a_login_is_used_and_never_printed() {
    let mut site = Site::new("login", Login::Wanted);
    let source = site.push("noop");
    site.docker = docker_config(&site.folder, &[site.proxy.address], USER, "wrong-secret");
    let refused = site.fails(&["policy", "pull", &source]);
    let expected = "its manifest: the registry refused the credentials of the docker configuration (HTTP 401)";
    assert!(refused.starts_with(&format!("error: {source}: {expected}")), "{refused}");
    site.docker = site.folder.join("nowhere");
    let refused = site.fails(&["policy", "pull", &source]);
    assert!(refused.contains("refused a caller without credentials (HTTP 401), expected a login"), "{refused}");
    // A helper, which says what it must not.
    site.docker = site.folder.join("helped");
    std::fs::create_dir_all(&site.docker).unwrap();
    let config = format!(r#"{{"credHelpers": {{"{}": "meridian-test"}}}}"#, site.proxy.address);
    std::fs::write(site.docker.join("config.json"), config).unwrap();
    let helper = site.folder.join("docker-credential-meridian-test");
    let pull = |answer: &str, ends: u8| {
        std::fs::write(&helper, format!("#!/bin/sh\ncat >/dev/null\necho '{answer}'\nexit {ends}\n")).unwrap();
        std::fs::set_permissions(&helper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", site.folder.display(), std::env::var("PATH").unwrap());
        let environment = [("DOCKER_CONFIG", site.docker.to_str().unwrap()), ("PATH", path.as_str())];
        meridian_with(&site.folder, &environment, &["policy", "pull", &source])
    };
    let good = format!(r#"{{"ServerURL": "x", "Username": "{USER}", "Secret": "{PASSWORD}"}}"#);
    let done = pull(&good, 0);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let done = pull(&good, 1);
    assert!(done.code == 1 && done.stderr.contains("the credential helper of the docker configuration failed"));
    let all: String = [done.stdout, done.stderr, refused].concat();
    assert!(!all.contains(PASSWORD) && !all.contains("wrong-secret"), "{all}");
}

/// Azure's registry: `docker login` leaves a refresh token, which is exchanged for a token of the repository.
#[test]
fn an_identity_token_is_exchanged_and_never_printed() {
    let mut site = Site::new("identity", Login::None);
    let source = site.push("noop");
    site.docker = site.folder.join("azure");
    std::fs::create_dir_all(&site.docker).unwrap();
    let nobody = "MDAwMDAwMDAtMDAwMC0wMDAwLTAwMDAtMDAwMDAwMDAwMDAwOg==";
    let login = format!(r#"{{"auth": "{nobody}", "identitytoken": "refresh-geheim+1"}}"#);
    let config = format!(r#"{{"auths": {{"{}": {login}}}}}"#, site.proxy.address);
    std::fs::write(site.docker.join("config.json"), config).unwrap();
    let tokens = Proxy::before(None);
    let challenge = |scheme: &str| {
        let head = "HTTP/1.1 401 Login\r\nContent-Length: 0\r\nConnection: close\r\nWWW-Authenticate:";
        Fault::Answer(format!("{head} {scheme}\r\n\r\n").into_bytes())
    };
    let bearer = format!("Bearer realm=\"http://{}/oauth2/token\",service=\"acr\"", tokens.address);
    let token = br#"{"access_token": "t0ken-geheim"}"#;
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", token.len());
    tokens.always("", Fault::Answer([head.as_bytes(), token].concat()));
    site.proxy.first("/manifests/", vec![challenge(&bearer)]);
    let file = site.folder.join("pulled.wasm");
    site.succeeds(&["policy", "pull", &source, "-o", file.to_str().unwrap()]);
    assert_eq!(std::fs::read(&file).unwrap(), bytes_of("noop"));
    let [asked] = <[_; 1]>::try_from(tokens.seen()).unwrap();
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("POST", "/oauth2/token"));
    let form = "grant_type=refresh_token&service=acr&scope=repository%3Ateam%2Fnoop%3Apull&client_id=meridian\
                &refresh_token=refresh-geheim%2B1";
    assert_eq!(String::from_utf8(asked.body).unwrap(), form);
    assert!(site.proxy.seen().iter().any(|seen| seen.head.contains("Bearer t0ken-geheim")));

    // A server of tokens that refuses it, and a registry that has none.
    tokens.always("", Fault::Status(401));
    site.proxy.always("/manifests/", challenge(&bearer));
    let refused = site.fails(&["policy", "pull", &source]);
    assert!(refused.contains("refused the identity token of the docker configuration (HTTP 401)"), "{refused}");
    site.proxy.always("/manifests/", challenge("Basic realm=\"x\""));
    let basic = site.fails(&["policy", "pull", &source]);
    assert!(basic.contains("has an identity token, and the registry wants a user name and a password"), "{basic}");
    assert!(!refused.contains("geheim") && !basic.contains("geheim"));
}

/// A registry that answers with this index, and passes on the manifests in it.
fn with_index(site: &Site, entries: &Value) -> String {
    let index = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries,
    });
    let index = index.to_string();
    let digest = format!("sha256:{}", sha256_of(index.as_bytes()));
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", index.len());
    let answer = Fault::Answer([head.as_bytes(), index.as_bytes()].concat());
    let path = format!("/manifests/{digest}");
    site.proxy.plan(move |_, asked| if asked.ends_with(&path) { answer.clone() } else { Fault::None });
    site.at(&format!("team/noop@{digest}"))
}

#[test]
fn an_index_is_followed_to_its_component_or_refused_by_its_content() {
    let site = Site::new("index", Login::None);
    let source = site.push("noop");
    let digest = source.split_once('@').unwrap().1;
    let entry = |digest: &str, os: &str, architecture: &str| {
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let platform = json!({ "os": os, "architecture": architecture });
        json!({ "mediaType": media_type, "digest": digest, "size": 1, "platform": platform })
    };
    let other = format!("sha256:{}", "ab".repeat(32));
    let pinned = with_index(&site, &json!([entry(&other, "linux", "amd64"), entry(digest, "wasip2", "wasm")]));
    let cache = site.folder.join("cache");
    let open = || {
        let components = Components::new(Some(cache.clone()), TrustedKeys::default()).with_registry_limits(QUICK);
        components.open(&pinned, "".as_ref()).unwrap().component().unwrap().sha256().to_owned()
    };
    assert_eq!(open(), sha256_of(&bytes_of("noop")));
    site.proxy.always("", Fault::Reset);
    assert_eq!(open(), sha256_of(&bytes_of("noop")), "the index is kept with what it leads to");
    let refused = with_index(&site, &json!([entry(&other, "linux", "amd64"), entry(&other, "linux", "arm64")]));
    let refused = site.fails(&["policy", "pull", &refused]);
    assert!(refused.contains("an index of 2 manifests (sha256:abab") && refused.contains("linux/arm64"), "{refused}");
}

#[test]
fn a_reference_says_what_is_wrong_with_it() {
    let site = Site::new("reference", Login::None);
    let digest = format!("sha256:{}", "0".repeat(64));
    let cases = [
        ("oci://127.0.0.1", "must be oci://HOST/NAME@sha256:DIGEST"),
        ("oci://127.0.0.1/x", "must end in @sha256:DIGEST, or in :TAG"),
        ("oci://127.0.0.1/x@sha256:00", "must have 64 hexadecimal digits"),
        ("oci://127.0.0.1/X:1", "must have a name behind the host"),
        ("oci://127.0.0.1:0/x:1", "must have a host name"),
        ("https://127.0.0.1/x:1", "must begin with oci://"),
    ];
    for (reference, expected) in cases {
        let refused = site.fails(&["policy", "pull", reference]);
        assert!(refused.contains(&format!("{reference:?}: {expected}")), "{refused}");
    }
    let refused = site.fails(&["policy", "pull", "oci://ann:geheim@example.com/x:1"]);
    assert!(refused.contains("oci://...@example.com/x:1") && !refused.contains("geheim"), "{refused}");
    let refused = site.fails(&["policy", "push", &shipped("noop"), &format!("oci://127.0.0.1/x@{digest}")]);
    assert!(refused.contains("a push must name a tag and no digest"), "{refused}");
    let config = site.folder.join("meridian.toml");
    let tag = site.at("x:1");
    std::fs::write(&config, format!("policy.eviction.source = {tag:?}\n")).unwrap();
    let refused = site.fails(&["config", "check", config.to_str().unwrap()]);
    let expected =
        format!("policy.eviction.source: {tag:?}: must end in @sha256:DIGEST, because a tag may name other bytes");
    assert!(refused.contains(&expected), "{refused}");
    let refused = site.fails(&["policy", "check", &tag]);
    assert!(refused.contains("must end in @sha256:DIGEST"), "{refused}");
    assert_eq!(site.proxy.seen().len(), 0, "nobody asked the registry");
}

#[test]
fn what_passes_is_tried_again_and_what_stays_is_told() {
    let site = Site::new("faults", Login::None);
    let source = site.push("srpt");
    for fault in [Fault::Status(500), Fault::Status(429), Fault::Status(503), Fault::Truncated, Fault::Reset] {
        for part in ["/manifests/", "/blobs/"] {
            site.proxy.first(part, vec![fault.clone(); 2]);
            assert_eq!(pull(QUICK, &source).unwrap().bytes, bytes_of("srpt"), "{fault:?} {part}");
            let asked = site.proxy.seen().iter().filter(|seen| seen.path.contains(part)).count();
            assert_eq!(asked, 3, "{fault:?} {part}");
            site.proxy.always(part, fault.clone());
            let refused = pull(QUICK, &source).unwrap_err();
            assert!(refused.is_transient(), "{refused}");
            assert_eq!(site.proxy.seen().iter().filter(|seen| seen.path.contains(part)).count(), 3);
        }
    }
    let told = |part, fault| {
        site.proxy.always(part, fault);
        pull(QUICK, &source).unwrap_err()
    };
    let refused = told("/blobs/", Fault::Status(500));
    assert_eq!(refused.to_string(), format!("{source}: the component: the registry answered HTTP 500, expected 200"));
    for (part, what) in [("/manifests/", "its manifest"), ("/blobs/", "the component")] {
        let refused = told(part, Fault::WrongBytes);
        assert!(refused.is_transient() && matches!(refused.problem, Problem::WrongDigest { .. }), "{refused}");
        assert!(refused.to_string().starts_with(&format!("{source}: {what}: received sha256:")), "{refused}");
        let refused = told(part, Fault::Endless);
        assert!(matches!(refused.problem, Problem::TooLarge { .. }), "{refused}");
        let refused = told(part, Fault::Status(404));
        assert!(!refused.is_transient() && matches!(refused.problem, Problem::NotFound { .. }), "{refused}");
        let short = Limits { silence: Duration::from_millis(50), attempts: 1, ..QUICK };
        site.proxy.always(part, Fault::Stall);
        let refused = pull(short, &source).unwrap_err();
        assert!(matches!(&refused.problem, Problem::Unreachable { why, .. } if why.contains("in time")), "{refused}");
        let short = Limits { total: Duration::from_millis(50), ..QUICK };
        let refused = pull(short, &source).unwrap_err();
        assert!(refused.is_transient(), "{refused}");
        assert_eq!(refused.to_string(), format!("{source}: the registry was not done within 0.05 s"));
        site.proxy.release();
    }
    site.proxy.always("", Fault::None);
    assert_eq!(pull(QUICK, &source).unwrap().bytes, bytes_of("srpt"));
    // Nobody listens there any more.
    let gone = site.registry.address;
    drop(site.registry);
    let refused = pull(QUICK, &format!("oci://{gone}/x:1")).unwrap_err();
    assert!(matches!(refused.problem, Problem::Unreachable { .. }) && refused.is_transient(), "{refused}");
}

#[test]
fn credentials_stay_with_their_registry() {
    let site = Site::new("redirect", Login::Wanted);
    let source = site.push("noop");
    let elsewhere = Proxy::before(None);
    let answer = |body: &[u8]| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        Fault::Answer([head.as_bytes(), body].concat())
    };
    let to = |location: &str| {
        let head =
            format!("HTTP/1.1 307 Elsewhere\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        Fault::Answer(head.into_bytes())
    };
    let whole = answer(&bytes_of("noop"));
    elsewhere.plan(move |_, _| whole.clone());
    site.proxy.always("/blobs/", to(&format!("http://{}/cdn?secret=1", elsewhere.address)));
    let file = site.folder.join("noop.wasm");
    site.succeeds(&["policy", "pull", &source, "-o", file.to_str().unwrap()]);
    assert_eq!(std::fs::read(&file).unwrap(), bytes_of("noop"));
    let (here, there) = (site.proxy.seen(), elsewhere.seen());
    assert!(here.iter().any(|seen| seen.head.to_lowercase().contains("authorization: basic ")));
    assert_eq!(there.len(), 1);
    assert!(!there[0].head.to_lowercase().contains("authorization"), "{}", there[0].head);
    for (location, expected) in [
        ("http://example.com/secret", "redirects to http://example.com, expected https"),
        ("ftp://127.0.0.1/secret", "redirects to ftp://127.0.0.1, expected https"),
        ("/v2/team/noop/blobs/again?secret", "redirects more than 5 times"),
    ] {
        site.proxy.always("/blobs/", to(location));
        let refused = site.fails(&["policy", "pull", &source]);
        assert!(refused.contains(expected) && !refused.contains("secret"), "{refused}");
    }
    // A place for tokens that is on no loopback and has no TLS gets no login.
    let challenge = "HTTP/1.1 401 Login\r\nWWW-Authenticate: Bearer realm=\"http://example.com/token\"\r\n\
                     Content-Length: 0\r\nConnection: close\r\n\r\n";
    site.proxy.always("/manifests/", Fault::Answer(challenge.into()));
    assert!(site.fails(&["policy", "pull", &source]).contains("(HTTP 401)"));
    // One on loopback gets it, and its token is used.
    let token = answer(br#"{"token": "t0ken"}"#);
    elsewhere.plan(move |_, _| token.clone());
    let challenge = challenge.replace("example.com", &elsewhere.address.to_string());
    site.proxy.plan(
        move |_, path| if path.contains("/manifests/") { Fault::Answer(challenge.clone().into()) } else { Fault::None },
    );
    let refused = site.fails(&["policy", "pull", &source]);
    assert!(refused.contains("(HTTP 401)") && !refused.contains("t0ken"), "{refused}");
    let asked = elsewhere.seen();
    assert!(asked[0].head.to_lowercase().contains("authorization: basic"), "{}", asked[0].head);
    assert!(asked[0].path.contains("scope=repository%3Ateam%2Fnoop%3Apull"), "{}", asked[0].path);
    assert!(site.proxy.seen().iter().any(|seen| seen.head.contains("Bearer t0ken")));
}

#[test]
fn only_the_layout_of_a_component_is_taken() {
    let site = Site::new("layout", Login::None);
    let source = site.push("noop");
    let manifest = site.manifest("team/noop", "1");
    type Change = fn(&mut Value);
    let changed = |change: Change| {
        let mut changed = manifest.clone();
        change(&mut changed);
        let bytes = changed.to_string().into_bytes();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", bytes.len());
        site.proxy.always("/manifests/", Fault::Answer([head.as_bytes(), &bytes].concat()));
        let (name, _) = source.split_once('@').unwrap();
        // The digest is the right one: whoever pinned it pinned no component.
        let refused = pull(QUICK, &format!("{name}@sha256:{}", sha256_of(&bytes))).unwrap_err();
        assert!(!refused.is_transient() && site.proxy.seen().len() == 1, "{refused}");
        refused.to_string()
    };
    let cases: [(Change, &str); 10] = [
        (|manifest| manifest["layers"] = json!([]), "0 layers, expected one"),
        (
            |manifest| manifest["layers"] = json!([manifest["layers"][0], manifest["layers"][0]]),
            "2 layers, expected one",
        ),
        (|manifest| manifest["layers"][0]["mediaType"] = "text/plain".into(), "a layer of type \"text/plain\""),
        (
            |manifest| manifest["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+zstd".into(),
            "a layer of type \"application/vnd.oci.image.layer.v1.tar+zstd\", packed with zstd, expected application/wasm",
        ),
        (|manifest| manifest["layers"][0]["digest"] = "sha256:../x".into(), "a layer with digest \"sha256:../x\""),
        (
            |manifest| manifest["layers"][0]["size"] = 33_554_433_u32.into(),
            "a layer of 33554433 bytes, expected at most 33554432",
        ),
        (
            |manifest| manifest["config"]["mediaType"] = "application/vnd.oci.image.config.v1+json".into(),
            "a configuration of type",
        ),
        (
            |manifest| manifest["mediaType"] = "application/vnd.oci.image.index.v1+json".into(),
            "a manifest of version 2",
        ),
        (|manifest| manifest["schemaVersion"] = 1.into(), "a manifest of version 1"),
        (|manifest| *manifest = json!([]), "its manifest: "),
    ];
    for (change, expected) in cases {
        let refused = changed(change);
        assert!(refused.contains(&format!("(as `wkg oci push` writes it): {expected}")), "{refused}");
    }
}

#[test]
fn what_was_fetched_is_there_when_the_registry_is_not() {
    let site = Site::new("store", Login::None);
    let source = site.push("srpt");
    let cache = site.folder.join("cache");
    let open = || {
        Components::new(Some(cache.clone()), TrustedKeys::default())
            .with_registry_limits(QUICK)
            .open(&source, "".as_ref())
    };
    open().unwrap();
    site.proxy.always("", Fault::Reset);
    assert_eq!(open().unwrap().component().unwrap().sha256(), sha256_of(&bytes_of("srpt")));
    assert_eq!(site.proxy.seen().len(), 0, "nothing was asked for");
    // What another wrote there is not there.
    let stored = cache.join("registry").join(format!("sha256-{}", sha256_of(&bytes_of("srpt"))));
    std::fs::write(&stored, bytes_of("noop")).unwrap();
    let refused = open().err().unwrap();
    assert!(refused.is_transient(), "{refused}");
    site.proxy.always("", Fault::None);
    open().unwrap();
    assert_eq!(std::fs::read(&stored).unwrap(), bytes_of("srpt"));
    assert_eq!(site.proxy.seen().len(), 1, "only what was missing");
}

#[test]
fn a_minisign_signature_comes_along() {
    let site = Site::new("minisign", Login::None);
    let file = site.folder.join("srpt.wasm");
    std::fs::copy(shipped("srpt"), &file).unwrap();
    let keys = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let signature = minisign::sign(None, &keys.sk, &*bytes_of("srpt"), Some("of srpt"), None).unwrap().to_string();
    let other = minisign::KeyPair::generate_unencrypted_keypair().unwrap().pk.to_base64();
    let (key, name) = (keys.pk.to_base64(), site.at("srpt:1"));
    let pushed = site.succeeds(&["policy", "push", file.to_str().unwrap(), &name]);
    assert_eq!(pushed["signatures"], json!([]));
    let source = pushed["source"].as_str().unwrap();
    let refused = site.fails(&["policy", "pull", source, "--key", &key]);
    assert!(
        refused.contains("not signed: expected a minisign or cosign signature in the registry by trusted key"),
        "{refused}"
    );
    assert!(!site.folder.join("srpt.wasm.minisig").exists());
    std::fs::write(site.folder.join("srpt.wasm.minisig"), &signature).unwrap();
    let pushed = site.succeeds(&["policy", "push", file.to_str().unwrap(), &name]);
    assert_eq!((pushed["signatures"].clone(), pushed["source"].as_str()), (json!(["minisign"]), Some(source)));
    let pulled = site.folder.join("pulled.wasm");
    let found = site.succeeds(&["policy", "pull", source, "--key", &key, "-o", pulled.to_str().unwrap()]);
    assert_eq!(
        (&found["signature"]["verified"], &found["signature"]["trusted_comment"]),
        (&json!(true), &json!("of srpt"))
    );
    assert_eq!(std::fs::read_to_string(site.folder.join("pulled.wasm.minisig")).unwrap(), signature);
    let refused = site.fails(&["policy", "pull", source, "--key", &other]);
    assert!(refused.contains("bad signature: made with key"), "{refused}");
    // The same keys as in a configuration, and without the registry from then on.
    let cache = site.folder.join("cache");
    let open = |key: &str| {
        let keys = TrustedKeys::parse("policy.trusted_keys", &[key], "".as_ref()).unwrap();
        Components::new(Some(cache.clone()), keys).with_registry_limits(QUICK).open(source, "".as_ref())
    };
    assert!(open(&other).err().unwrap().to_string().contains("bad signature"));
    open(&key).unwrap();
    site.proxy.always("", Fault::Reset);
    assert_eq!(open(&key).unwrap().component().unwrap().signer().unwrap().trusted_comment, "of srpt");
    assert!(open(&other).is_err());
}

#[test]
fn a_signature_of_cosign_is_of_its_manifest_alone() {
    let site = Site::new("cosign", Login::None);
    let (private, public) = ecdsa_key();
    let (_, other) = ecdsa_key();
    let (key, public_file) = (site.folder.join("cosign.key"), site.folder.join("cosign.pub"));
    std::fs::write(&key, private).unwrap();
    std::fs::write(&public_file, &public).unwrap();
    let push = |policy: &str| {
        let name = site.at(&format!("{policy}:1"));
        let pushed = site.succeeds(&["policy", "push", &shipped(policy), &name, "--sign-key", key.to_str().unwrap()]);
        assert_eq!(pushed["signatures"], json!(["cosign"]));
        pushed["source"].as_str().unwrap().to_owned()
    };
    let (srpt, edf) = (push("srpt"), push("edf"));
    // As `cosign verify --key` reads it.
    let tag = |source: &str| format!("{}.sig", source.split_once('@').unwrap().1.replace(':', "-"));
    let manifest = site.manifest("srpt", &tag(&srpt));
    let layer = &manifest["layers"][0];
    assert_eq!(layer["mediaType"], "application/vnd.dev.cosign.simplesigning.v1+json");
    assert!(layer["annotations"]["dev.cosignproject.cosign/signature"].is_string());
    let payload: Value = serde_json::from_slice(&site.blob("srpt", layer["digest"].as_str().unwrap())).unwrap();
    let digest = srpt.split_once('@').unwrap().1;
    assert_eq!(payload["critical"]["image"]["docker-manifest-digest"], digest);
    assert_eq!(payload["critical"]["identity"]["docker-reference"], format!("{}/srpt", site.proxy.address));
    assert_eq!(payload["critical"]["type"], "cosign container image signature");

    let pull = |source: &str, key: &str| {
        site.meridian(&["--json", "policy", "pull", source, "-o", "pulled.wasm", &format!("--key={key}")])
    };
    for key in [public.as_str(), "cosign.pub"] {
        let done = pull(&srpt, key);
        assert_eq!(done.code, 0, "{}", done.stderr);
        let found: Value = serde_json::from_str(&done.stdout).unwrap();
        assert_eq!(found["signature"]["trusted_comment"], format!("manifest {digest}"));
    }
    let refused = pull(&srpt, &other).stdout;
    assert!(refused.contains("no cosign signature in the registry is one of manifest sha256:"), "{refused}");
    // Two keys may have signed it; a second push adds.
    let (second, second_public) = ecdsa_key();
    let second_file = site.folder.join("second.key");
    std::fs::write(&second_file, second).unwrap();
    site.succeeds(&[
        "policy",
        "push",
        &shipped("srpt"),
        &site.at("srpt:1"),
        "--sign-key",
        second_file.to_str().unwrap(),
    ]);
    assert_eq!((pull(&srpt, &public).code, pull(&srpt, &second_public).code), (0, 0));
    // That of another component.
    let registry = Registry::new(QUICK);
    let fetched = |source: &str| registry.pull(&OciReference::pinned(source).unwrap(), Signatures::Fetch).unwrap();
    let keys = TrustedKeys::parse("policy.trusted_keys", &[&public], "".as_ref()).unwrap();
    let (of_srpt, mut of_edf) = (fetched(&srpt), fetched(&edf));
    assert!(keys.signer_of(&of_srpt).unwrap().is_some() && keys.signer_of(&of_edf).unwrap().is_some());
    of_edf.cosign = of_srpt.cosign.clone();
    assert!(keys.signer_of(&of_edf).is_err());
    let mut altered = of_srpt;
    altered.cosign.iter_mut().for_each(|signature| signature.payload.push(b' '));
    assert!(keys.signer_of(&altered).is_err());
    let refused = site.fails(&["policy", "push", &shipped("srpt"), &site.at("srpt:1"), "--sign-key", "cosign.pub"]);
    assert!(refused.contains("--sign-key: cosign.pub: not a usable private key, expected PKCS #8"), "{refused}");
}

/// A private and a public key in PEM.
fn ecdsa_key() -> (String, String) {
    use base64::Engine as _;
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
    let random = ring::rand::SystemRandom::new();
    let private = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, private.as_ref(), &random).unwrap();
    // RFC 5480: the algorithm and the curve, and then the point.
    let prefix =
        b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00";
    let pem = |label: &str, der: &[u8]| {
        let base64 = base64::prelude::BASE64_STANDARD.encode(der);
        let lines: Vec<_> = base64.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
        format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
    };
    let public = [prefix.as_slice(), pair.public_key().as_ref()].concat();
    (pem("PRIVATE KEY", private.as_ref()), pem("PUBLIC KEY", &public))
}

const FACTS: EngineFacts = EngineFacts {
    now_ms: 0.0,
    token_budget: 64,
    free_blocks: 0,
    total_blocks: 0,
    free_seats: 4,
    waiting: 0,
    decode_tokens: 1,
};

/// An engine of this configuration, which retries at once.
fn engine(site: &Site, config: &str) -> Engine {
    let settings = Settings {
        cache_dir: Some(site.folder.join("cache")),
        registry: QUICK,
        fetch_pace: FetchPace { first: Duration::ZERO, longest: Duration::ZERO },
        ..Settings::default()
    };
    Engine::start(MeridianConfig::from_toml(config).unwrap(), settings).unwrap()
}

fn active(engine: &Engine, slot: SlotName) -> String {
    engine.control().status().slots.into_iter().find(|status| status.slot == slot).unwrap().active.name
}

/// Decide steps on this thread until `is_over`; returns how many.
fn decide_until(engine: &Engine, mut is_over: impl FnMut() -> bool) -> u64 {
    let mut steps = 0;
    while !is_over() {
        assert_eq!(engine.drive().plan(&FACTS, &[], &[]).token_budget, 64);
        steps += 1;
    }
    steps
}

/// Names of the threads of this process that have connections to make.
fn fetching_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "meridian-fetch").count()
}

#[test]
fn an_engine_decides_while_the_registry_stalls_and_swaps_when_it_answers() {
    let site = Site::new("engine", Login::None);
    let source = site.push("srpt");
    site.proxy.always("/blobs/", Fault::Stall);
    let engine = engine(&site, &format!("policy.dispatch.source = {source:?}\npolicy.watch = true"));
    assert_eq!(active(&engine, SlotName::Dispatch), "balanced");
    site.proxy.wait_for_stalled(1);
    assert!(fetching_threads() > 0, "the network is on a thread of its own");
    let mut left = 1000;
    decide_until(&engine, || {
        left -= 1;
        left == 0
    });
    assert_eq!(active(&engine, SlotName::Dispatch), "balanced", "the registry has not answered");
    let problems = engine.control().status().problems;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].starts_with("policy.dispatch.source: oci://127.0.0.1"), "{problems:?}");
    // No other change waits for it.
    let native = Upload { policy: Given::Native("fixed-budget"), options: None, source: "native:fixed-budget" };
    assert_eq!(engine.swap(SlotName::Budget, &native, Mode::Active).unwrap().active.name, "fixed-budget");
    let component = bytes_of("tiered-lru");
    engine.swap(SlotName::Eviction, &Upload::component(&component, "test"), Mode::Active).unwrap();
    site.proxy.release();
    let steps = decide_until(&engine, || active(&engine, SlotName::Dispatch) == "srpt");
    assert!(steps > 0);
    let status = engine.control().status().slots.remove(0);
    assert_eq!((status.active.source, status.active.sha256), (source.clone(), sha256_of(&bytes_of("srpt"))));
    let faults: u64 = status.faults.iter().map(|(_, count)| count).sum();
    assert_eq!((status.last_refusal, faults, status.swaps), (None, 0, 1));
    engine.shutdown();
    // The next one needs no registry.
    site.proxy.always("", Fault::Reset);
    let engine = self::engine(&site, &format!("policy.dispatch.source = {source:?}"));
    assert_eq!(active(&engine, SlotName::Dispatch), "srpt");
    assert!(engine.control().status().problems.is_empty());
    assert_eq!(site.proxy.seen().len(), 0);
}

#[test]
fn wrong_answers_change_no_policy_and_a_later_right_one_does() {
    let site = Site::new("wrong", Login::None);
    let source = site.push("srpt");
    // Each kind ends one fetch; what is worth another attempt needs three.
    let mut faults = [
        vec![Fault::WrongBytes, Fault::Endless],
        vec![Fault::Status(500); 3],
        vec![Fault::Truncated; 3],
        vec![Fault::Reset; 3],
    ]
    .concat()
    .into_iter();
    site.proxy
        .plan(move |_, path| if path.contains("/blobs/") { faults.next().unwrap_or(Fault::None) } else { Fault::None });
    let engine = engine(&site, &format!("[policy.dispatch]\nsource = {source:?}\nmode = 'shadow'"));
    let shadow = || engine.control().status().slots.remove(0).shadow.map(|shadow| shadow.version);
    decide_until(&engine, || shadow().is_some());
    assert_eq!(shadow().unwrap().source, source);
    assert_eq!(active(&engine, SlotName::Dispatch), "fcfs");
    assert_eq!(site.proxy.seen().iter().filter(|seen| seen.path.contains("/blobs/")).count(), 12);
}

#[test]
fn an_operator_decides_over_the_configuration() {
    let site = Site::new("operator", Login::None);
    let (srpt, edf) = (site.push("srpt"), site.push("edf"));
    site.proxy.plan({
        let digest = srpt.split_once('@').unwrap().1.to_owned();
        move |_, path| if path.contains(&digest) { Fault::Stall } else { Fault::None }
    });
    let engine = engine(&site, &format!("policy.dispatch.source = {srpt:?}"));
    site.proxy.wait_for_stalled(1);
    let put = |source: &str| {
        engine.swap(SlotName::Dispatch, &Upload { policy: Given::Remote(source), options: None, source }, Mode::Active)
    };
    assert_eq!(put(&edf).unwrap().active.source, edf);
    site.proxy.release();
    decide_until(&engine, || engine.control().status().problems.is_empty());
    assert_eq!(active(&engine, SlotName::Dispatch), "edf", "the fetch of the configuration was overtaken");
    assert_eq!(put(&edf).unwrap().action, "unchanged");
    // A refusal is kept, a failure that may pass is not.
    let missing = edf.replace(&edf[edf.len() - 8..], "00000000");
    let refused = put(&missing).unwrap_err();
    assert!(matches!(&refused, ControlError::Refused(why) if why.contains("does not have it (HTTP 404)")), "{refused}");
    assert!(engine.control().status().slots[0].last_refusal.as_ref().unwrap().contains(&missing));
    site.proxy.always("", Fault::Status(503));
    assert!(matches!(put(&missing).unwrap_err(), ControlError::Busy(_)));
    assert!(put("oci://127.0.0.1/x:1").unwrap_err().to_string().contains("must end in @sha256:DIGEST"));
    assert_eq!(active(&engine, SlotName::Dispatch), "edf");
}

impl Site {
    /// A document that the registry has under a tag or digest.
    fn manifest(&self, name: &str, tag: &str) -> Value {
        serde_json::from_slice(&self.get(&format!("{name}/manifests/{tag}"))).unwrap()
    }

    fn blob(&self, name: &str, digest: &str) -> Vec<u8> {
        self.get(&format!("{name}/blobs/{digest}"))
    }

    /// As any client of HTTP.
    fn get(&self, path: &str) -> Vec<u8> {
        use base64::Engine as _;
        let login = base64::prelude::BASE64_STANDARD.encode(format!("{USER}:{PASSWORD}"));
        let mut stream = TcpStream::connect(self.registry.address).unwrap();
        let accept = "application/vnd.oci.image.manifest.v1+json";
        let head = format!(
            "GET /v2/{path} HTTP/1.0\r\nHost: {}\r\nAccept: {accept}\r\nAuthorization: Basic {login}\r\n\r\n",
            self.registry.address
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let body = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        assert!(answer.starts_with(b"HTTP/1.0 200"), "{}", String::from_utf8_lossy(&answer));
        answer.split_off(body)
    }
}
