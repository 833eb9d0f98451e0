//! Logins as docker, podman and the kubelet keep them.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use meridian_core::file::read_regular_text;
use meridian_core::oci::OciReference;
use serde_json::{Map, Value};

use crate::auth::Credentials;

/// Largest file, bytes.
const MAX_BYTES: u64 = 1 << 20;
/// The name of a user whose password is an identity token.
const TOKEN_USER: &str = "<token>";
const DOCKER_HUB: &str = "docker.io";

/// The first login that a configuration of this user has for the reference. May ask a credential helper, and wait for it.
///
/// # Errors
/// One line: the file, what is wrong, and what was expected. It holds no secret.
pub(crate) fn find(reference: &OciReference) -> Result<Credentials, String> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(text) = var("DOCKER_AUTH_CONFIG") {
        let text = text.into_string().unwrap_or_default();
        if let Some(found) = of_text(&text, reference).map_err(|why| format!("DOCKER_AUTH_CONFIG: {why}"))? {
            return Ok(found);
        }
    }
    let uid = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
    for file in files(var, uid) {
        if let Some(found) = of_file(&file, reference)? {
            return Ok(found);
        }
    }
    Ok(Credentials::Anonymous)
}

/// Where the configurations may be, the first one first: podman's own choice, docker's, where a Secret of Kubernetes may be
/// mounted, and podman's.
fn files(var: impl Fn(&str) -> Option<OsString>, uid: u32) -> Vec<PathBuf> {
    let folder = |name: &str| var(name).map(PathBuf::from);
    let home = folder("HOME");
    let in_home = |path: &str| home.as_ref().map(|home| home.join(path));
    let docker = folder("DOCKER_CONFIG").or_else(|| in_home(".docker"));
    let podman = match folder("XDG_RUNTIME_DIR") {
        Some(run) => run.join("containers/auth.json"),
        None => format!("/run/containers/{uid}/auth.json").into(),
    };
    let config = folder("XDG_CONFIG_HOME").or_else(|| in_home(".config"));
    let of_docker = ["config.json", ".dockerconfigjson", ".dockercfg"].map(|name| Some(docker.as_ref()?.join(name)));
    let others = [Some(podman), config.map(|config| config.join("containers/auth.json")), in_home(".dockercfg")];
    folder("REGISTRY_AUTH_FILE").into_iter().chain(of_docker.into_iter().chain(others).flatten()).collect()
}

fn of_file(file: &Path, reference: &OciReference) -> Result<Option<Credentials>, String> {
    if file.is_dir() {
        // What a bind mount of a missing file leaves.
        return Ok(None);
    }
    let text = match read_regular_text(file, MAX_BYTES) {
        // Another user's home, perhaps.
        Err(error)
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied) =>
        {
            tracing::debug!(file = %file.display(), %error, "no logins");
            return Ok(None);
        }
        text => text.map_err(|error| format!("{}: cannot be read: {error}", file.display()))?,
    };
    of_text(&text, reference).map_err(|why| format!("{}: {why}", file.display()))
}

fn of_text(text: &str, reference: &OciReference) -> Result<Option<Credentials>, String> {
    const EXPECTED: &str = "expected a JSON object as `docker login` writes it";
    // The text of the error may hold a secret.
    let config = serde_json::from_str(text);
    let config: Value = config.map_err(|error| format!("line {}: malformed, {EXPECTED}", error.line()))?;
    let config = config.as_object().ok_or(EXPECTED)?;
    let map = |field: &str| config.get(field).and_then(Value::as_object);
    // The oldest form has the logins alone.
    let is_old = ["auths", "credHelpers", "credsStore"].iter().all(|field| !config.contains_key(*field));
    let logins = if is_old { Some(config) } else { map("auths") };

    let named = map("credHelpers").and_then(|helpers| best(helpers, reference)).map(|(_, name)| name);
    let asked = match named.and_then(Value::as_str).filter(|name| !name.is_empty()) {
        Some(name) => helped(name, reference),
        None => Ok(None),
    };
    let failed = match asked {
        Ok(Some(found)) => return Ok(Some(found)),
        Ok(None) => None,
        Err(why) => Some(why),
    };
    if let Some((key, login)) = logins.and_then(|logins| best(logins, reference))
        && let Some(found) = login_of(login).map_err(|why| format!("auths.{key:?}: {why}"))?
    {
        return Ok(Some(found));
    }
    if let Some(why) = failed {
        return Err(why);
    }
    match config.get("credsStore").and_then(Value::as_str) {
        Some(name) if named.is_none() && !name.is_empty() => helped(name, reference),
        _ => Ok(None),
    }
}

/// The entry that names most of the reference.
fn best<'a>(entries: &'a Map<String, Value>, reference: &OciReference) -> Option<(&'a String, &'a Value)> {
    let named = entries.iter().filter_map(|entry| Some((scope(entry.0, reference)?, entry)));
    named.max_by_key(|(scope, _)| *scope).map(|(_, entry)| entry)
}

/// How much of the reference a key names: the length of its path, and whether its host is no pattern. `None`: not the
/// reference. Keys are hosts, perhaps with a scheme, with docker's `/v1/` or with the path of repositories below.
fn scope(key: &str, reference: &OciReference) -> Option<(usize, bool)> {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = path.trim_end_matches('/');
    let path = ["v1", "v2"].iter().find_map(|version| path.strip_prefix(version)).map_or(path, |rest| {
        // `v1` is a version, `v1beta` a name.
        if rest.is_empty() || rest.starts_with('/') { rest.trim_start_matches('/') } else { path }
    });
    let (host, wanted) = (canonical(host), canonical(reference.host()));
    let (parts, wanted_parts) = (host.split('.'), wanted.split('.'));
    let is_host = parts.clone().count() == wanted_parts.clone().count()
        && parts.zip(wanted_parts).all(|(part, wanted)| match part.split_once('*') {
            None => part == wanted,
            Some((start, end)) => {
                wanted.len() >= start.len() + end.len() && wanted.starts_with(start) && wanted.ends_with(end)
            }
        });
    let below = reference.repository().strip_prefix(path)?;
    let is_path = path.is_empty() || below.is_empty() || below.starts_with('/');
    (is_host && is_path).then_some((path.len(), !host.contains('*')))
}

/// One name for each registry.
fn canonical(host: &str) -> String {
    let host = host.to_ascii_lowercase();
    let host = host.strip_suffix(":443").unwrap_or(&host);
    if ["index.docker.io", "registry-1.docker.io"].contains(&host) { DOCKER_HUB.into() } else { host.into() }
}

/// The credentials of an entry, if it has some.
fn login_of(login: &Value) -> Result<Option<Credentials>, &'static str> {
    let text = |field: &str| match login.get(field) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err("malformed, expected texts as `docker login` writes them"),
    };
    let (identity, registry) = (text("identitytoken")?, text("registrytoken")?);
    if !identity.is_empty() {
        return Ok(Some(Credentials::Refresh(identity.into())));
    }
    if !registry.is_empty() {
        return Ok(Some(Credentials::Token(registry.into())));
    }
    let auth = text("auth")?;
    if auth.is_empty() {
        return Ok(of_user(text("username")?, text("password")?));
    }
    let engine = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let auth: String = auth.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    let decoded =
        GeneralPurpose::new(&STANDARD, engine).decode(auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    match decoded.as_deref().and_then(|decoded| decoded.split_once(':')) {
        // Docker pads some passwords so.
        Some((user, password)) => Ok(of_user(user, password.trim_matches('\0'))),
        None => Err("auth: malformed, expected base64 of USER:PASSWORD"),
    }
}

fn of_user(user: &str, password: &str) -> Option<Credentials> {
    match (user, password) {
        (_, "") => None,
        (TOKEN_USER, token) => Some(Credentials::Refresh(token.into())),
        (user, password) => Some(Credentials::Login { user: user.into(), password: password.into() }),
    }
}

/// What a credential helper has. Its output is never shown: it may hold the secret.
fn helped(name: &str, reference: &OciReference) -> Result<Option<Credentials>, String> {
    let failed = || format!("the credential helper of the docker configuration failed: {name:?}, expected a login");
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
        return Err(format!("credential helper {name:?}: expected the NAME of a docker-credential-NAME"));
    }
    let host = canonical(reference.host());
    let server = if host == DOCKER_HUB { "https://index.docker.io/v1/" } else { reference.host() };
    let command = format!("docker-credential-{name}");
    let mut command = Command::new(command);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut helper = command.spawn().map_err(|_| failed())?;
    if let Some(mut input) = helper.stdin.take() {
        // It need not read.
        let _ = input.write_all(server.as_bytes());
    }
    let output = helper.wait_with_output().map_err(|_| failed())?;
    if !output.status.success() {
        let is_unknown = String::from_utf8_lossy(&output.stdout).contains("credentials not found");
        return if is_unknown { Ok(None) } else { Err(failed()) };
    }
    let found: Value = serde_json::from_slice(&output.stdout).map_err(|_| failed())?;
    match (found["Username"].as_str(), found["Secret"].as_str()) {
        (Some(user), Some(secret)) => Ok(of_user(user, secret)),
        _ => Err(failed()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reference(name: &str) -> OciReference {
        OciReference::parse(&format!("oci://{name}:1")).unwrap()
    }

    /// Shown, so that tests compare it.
    fn found(config: &Value, name: &str) -> Result<String, String> {
        of_text(&config.to_string(), &reference(name)).map(|found| match found {
            None | Some(Credentials::Anonymous) => "none".into(),
            Some(Credentials::Login { user, password }) => format!("{user} {password}"),
            Some(Credentials::Refresh(token)) => format!("refresh {token}"),
            Some(Credentials::Token(token)) => format!("token {token}"),
        })
    }

    #[test]
    fn entries_of_every_form() {
        for (login, expected) in [
            (json!({ "auth": "YW5uOmdlOmhlaW0=" }), "ann ge:heim"),
            (json!({ "auth": "YW5uOmdlOmhlaW0" }), "ann ge:heim"),
            (json!({ "auth": " YW5uOmdl\nOmhlaW0=\n" }), "ann ge:heim"),
            (json!({ "auth": "YW5uOmdlaGVpbQAA", "email": "a@b" }), "ann geheim"),
            (json!({ "username": "ann", "password": "geheim" }), "ann geheim"),
            (json!({ "username": "bob", "password": "x", "auth": "YW5uOmdlaGVpbQ==" }), "ann geheim"),
            (json!({ "auth": "MDA6", "identitytoken": "t" }), "refresh t"),
            (json!({ "username": "<token>", "password": "t" }), "refresh t"),
            (json!({ "registrytoken": "t" }), "token t"),
            (json!({}), "none"),
            (json!({ "auth": null, "username": "", "password": "" }), "none"),
        ] {
            for config in [json!({ "auths": { "r.example": login } }), json!({ "r.example": login })] {
                assert_eq!(found(&config, "r.example/a"), Ok(expected.into()), "{config}");
            }
        }
        for (login, why) in [
            (json!({ "auth": "!" }), "auth: malformed, expected base64 of USER:PASSWORD"),
            (json!({ "auth": "YW5u" }), "auth: malformed, expected base64 of USER:PASSWORD"),
            (json!({ "password": 7 }), "malformed, expected texts as `docker login` writes them"),
        ] {
            let config = json!({ "auths": { "r.example": login, "other": { "auth": 5 } } });
            assert_eq!(found(&config, "r.example/a"), Err(format!("auths.\"r.example\": {why}")));
            assert_eq!(found(&config, "s.example/a"), Ok("none".into()), "an entry that is not asked for");
        }
        for text in ["", "{", "[]", "7", "{\"auths\": {\"a\": geheim"] {
            let why = of_text(text, &reference("a/b")).err().unwrap();
            assert!(why.ends_with("expected a JSON object as `docker login` writes it") && !why.contains("geheim"));
        }
        assert_eq!(found(&json!({ "auths": null, "credsStore": null, "credHelpers": null }), "a/b"), Ok("none".into()));
        let why = "credential helper \"../x\": expected the NAME of a docker-credential-NAME";
        for config in [json!({ "credsStore": "../x" }), json!({ "credHelpers": { "a": "../x" } })] {
            assert_eq!(found(&config, "a/b"), Err(why.into()));
        }
        // One that fails is of no matter beside a login, and an empty name is none.
        let login = json!({ "a": { "auth": "YW5uOmdlaGVpbQ==" } });
        for config in [
            json!({ "auths": login, "credHelpers": { "a": "meridian-absent" } }),
            json!({ "auths": login, "credHelpers": { "a": "" }, "credsStore": "meridian-absent" }),
            json!({ "auths": login, "credsStore": "meridian-absent" }),
        ] {
            assert_eq!(found(&config, "a/b"), Ok("ann geheim".into()), "{config}");
        }
        assert!(found(&json!({ "credsStore": "meridian-absent" }), "a/b").is_err());
    }

    #[test]
    fn the_key_that_names_most_is_taken() {
        let is_for = |key: &str, name: &str| scope(key, &reference(name)).is_some();
        for key in [
            "r.example:5000",
            "R.example:5000/",
            "https://r.example:5000",
            "http://r.example:5000/v1/",
            "https://r.example:5000/v2",
            "r.example:5000/team",
            "r.example:5000/team/",
            "r.example:5000/team/srpt",
            "https://r.example:5000/v2/team",
            "*.example:5000",
            "r.ex*:5000",
        ] {
            assert!(is_for(key, "r.example:5000/team/srpt"), "{key}");
        }
        for key in [
            "",
            "r.example",
            "r.example:5001",
            "r.example:5000/tea",
            "r.example:5000/team/srpt/more",
            "r.example:5000/v1beta",
            "q.r.example:5000",
            "*:5000",
            "*.r.example:5000",
            "ftp://r.example:5000",
        ] {
            assert!(!is_for(key, "r.example:5000/team/srpt"), "{key}");
        }
        assert!(is_for("r.example:443", "r.example/a") && is_for("r.example/v1beta", "r.example/v1beta/a"));
        let aliases = ["docker.io", "index.docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"];
        for key in aliases {
            assert!(is_for(key, "docker.io/ann/a") && is_for(key, "index.docker.io/ann/a"), "{key}");
        }
        let config = json!({ "auths": {
            "*.example": { "auth": "YTph" },
            "r.example": { "auth": "Yjpi" },
            "r.example/team": { "auth": "Yzpj" },
            "https://r.example/team/srpt": { "auth": "ZDpk" },
        } });
        for (name, expected) in [
            ("q.example/x", "a a"),
            ("r.example/x", "b b"),
            ("r.example/team/x", "c c"),
            ("r.example/team/srpt", "d d"),
        ] {
            assert_eq!(found(&config, name), Ok(expected.into()), "{name}");
        }
    }

    #[test]
    fn places() {
        let of = |set: &[(&str, &str)]| {
            let var = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
            files(var, 7).iter().map(|file| file.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), ["/run/containers/7/auth.json"]);
        let all = [
            ("HOME", "/h"),
            ("REGISTRY_AUTH_FILE", "/a.json"),
            ("DOCKER_CONFIG", "/d"),
            ("XDG_RUNTIME_DIR", "/run/user/7"),
        ];
        let docker = ["/d/config.json", "/d/.dockerconfigjson", "/d/.dockercfg"];
        let others = ["/run/user/7/containers/auth.json", "/h/.config/containers/auth.json", "/h/.dockercfg"];
        assert_eq!(of(&all), [&["/a.json"][..], &docker, &others].concat());
        assert_eq!(of(&all[..1])[0], "/h/.docker/config.json");
    }
}
