//! The fleet file: what is read, and how a mistake is named.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use meridian_fleet::{Fleet, FleetError, Member};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn write(path: &Path, text: &str, mode: u32) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn engines_take_what_they_lack_from_the_file() {
    let folder = folder("fleet-file");
    let path = folder.join("fleet.toml");
    let text = "
token_file = 'all.token'
ca_file = 'ca.pem'
[[engine]]
address = 'https://10.0.0.7:9465'
[[engine]]
name = 'b'
address = 'unix:/run/meridian.sock'
token_file = '/etc/b.token'
";
    write(&path, text, 0o644);
    let fleet = Fleet::from_file(&path).unwrap();
    let found: Vec<_> = fleet.engines.iter().map(|engine| (engine.name(), engine.address())).collect();
    assert_eq!(found, [("https://10.0.0.7:9465", "https://10.0.0.7:9465"), ("b", "unix:/run/meridian.sock")]);
    let tokens: Vec<_> = fleet.engines.iter().map(|engine| engine.token_file().unwrap().to_owned()).collect();
    assert_eq!(tokens, [folder.join("all.token"), PathBuf::from("/etc/b.token")]);
}

#[test]
fn mistakes_name_the_field_and_the_value() {
    let folder = folder("fleet-mistakes");
    let path = folder.join("fleet.toml");
    let engine = |rest: &str| format!("[[engine]]\naddress = 'https://a:1'\n{rest}");
    let many = "[[engine]]\naddress = 'https://a:1'\n".repeat(10_001);
    for (text, why) in [
        (String::new(), "engine: must have at least one entry, or local = true"),
        ("[[engine]]\n".into(), "line 1: missing field `address`"),
        (
            engine("port = 1"),
            "line 3: unknown field `port`, expected one of `name`, `address`, `token_file`, `ca_file`",
        ),
        ("fleet = 1".into(), "line 1: unknown field `fleet`"),
        ("local = 'yes'".into(), "line 1: invalid type: string \"yes\", expected a boolean"),
        ("\n[[engine]\n".into(), "line 2: "),
        (
            "[[engine]]\naddress = '10.0.0.7:9465'".into(),
            "engine[0].address: \"10.0.0.7:9465\": must be a loopback address with a port, unix:PATH, or https://HOST:port",
        ),
        (engine("name = ''"), "engine[0].name: \"\": must be 1 to 128 bytes of printable text"),
        (engine("name = \"\\u001b[2J\""), "engine[0].name: \"\\u{1b}[2J\": must be 1 to 128 bytes of printable text"),
        (engine(&format!("name = '{}'", "n".repeat(129))), "must be 1 to 128 bytes of printable text"),
        (engine("") + &engine(""), "engine[1].name: \"https://a:1\": another engine has it"),
        (engine("name = 'a'\n") + &engine("name = 'b'"), "engine[1].address: \"https://a:1\": another engine has it"),
        (many, "engine: 10001 entries, must be at most 10000"),
    ] {
        write(&path, &text, 0o644);
        let error = Fleet::from_file(&path).unwrap_err();
        let line = error.to_string();
        assert!(line.starts_with(&format!("{}: {why}", path.display())) || line.ends_with(why), "{line}");
        assert!(!line.contains(char::is_control) && line.len() < 500, "{line}");
        assert!(matches!(error, FleetError::File { .. }));
    }
    for bytes in [b"local = \xff".as_slice(), &vec![b'#'; (4 << 20) + 1]] {
        std::fs::write(&path, bytes).unwrap();
        assert!(Fleet::from_file(&path).is_err());
    }
    assert!(Fleet::from_file(&folder).is_err() && Fleet::from_file(&folder.join("absent")).is_err());
}

/// Who can write it chooses where the tokens go.
#[test]
fn a_file_that_others_can_write_is_not_used() {
    let folder = folder("fleet-open-file");
    let path = folder.join("fleet.toml");
    for (mode, is_used) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
        write(&path, "[[engine]]\naddress = 'https://a:1'\n", mode);
        let read = Fleet::from_file(&path);
        assert_eq!(read.is_ok(), is_used, "{mode:o}");
        if let Err(error) = read {
            let line = error.to_string();
            assert!(
                line.ends_with(&format!("has mode {mode:04o}, must be 0644 or less: other users must not write it"))
            );
        }
    }
}
