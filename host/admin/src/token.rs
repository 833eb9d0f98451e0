//! The bearer tokens that changes need.

use std::collections::BTreeSet;
use std::path::Path;

use subtle::ConstantTimeEq;

use meridian_engine::private;

const BYTES: std::ops::RangeInclusive<usize> = 16..=4096;
/// Most tokens of a file.
const MAX_TOKENS: usize = 64;
/// Longest name of a token, bytes.
const MAX_NAME_BYTES: usize = 64;
/// What a line must be.
const LINE: &str =
    "must be NAME TOKEN, with `read`, `change` or `all` after them, or the file must hold one token alone";
/// The name of a token without one.
const UNNAMED: &str = "token";

/// What the bearer of a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Read.
    Read,
    /// And change what decides, among what the engine has: promote, roll back, stop a shadow, set budgets.
    Change,
    /// And give the engine another policy.
    All,
}

/// A token, the name that the audit log has for its bearer, and what it may do. It is never shown: there is no `Debug`.
pub(super) struct Token {
    pub(super) name: String,
    pub(super) role: Role,
    token: Vec<u8>,
}

/// Read the token from a file of this user of mode 0600: 16 to 4096 visible ASCII characters, with optional white space
/// around them. Of a file with lines `NAME TOKEN [ROLE]` the first of those whose role allows most.
///
/// # Errors
/// The problem and the expectation; the text follows the path, and never includes the contents.
pub fn read_token(path: &Path) -> Result<String, String> {
    let tokens = read_tokens(path)?.0.into_iter();
    // Of equal ones, `max_by_key` takes the last.
    let Token { token, .. } = tokens.rev().max_by_key(|token| token.role).ok_or("holds no token")?;
    Ok(token.into_iter().map(char::from).collect())
}

/// Read every token of a file, as [`read_token`] does one, and whether its role allows changes; without the names.
///
/// # Errors
/// Those of [`read_token`].
pub fn read_all_tokens(path: &Path) -> Result<Vec<(String, bool)>, String> {
    let text = |token: Vec<u8>| token.into_iter().map(char::from).collect();
    Ok(read_tokens(path)?.0.into_iter().map(|Token { token, role, .. }| (text(token), role > Role::Read)).collect())
}

/// Read every token of a file, as [`read_token`] does.
pub(super) fn read_tokens(path: &Path) -> Result<Tokens, String> {
    let line = MAX_NAME_BYTES + BYTES.end() + 64;
    parse(&private::read(path, MAX_TOKENS * line)?)
}

fn parse(bytes: &[u8]) -> Result<Tokens, String> {
    let words = |line: &[u8]| -> Vec<Vec<u8>> {
        line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(<[u8]>::to_vec).collect()
    };
    let lines = (1..).zip(bytes.split(|byte| *byte == b'\n').map(words)).filter(|(_, words)| !words.is_empty());
    let lines: Vec<(usize, Vec<Vec<u8>>)> = lines.collect();
    let mut tokens = Vec::new();
    match lines.as_slice() {
        [] => check(&[])?,
        [(_, words)] if words.len() == 1 => {
            check(&words[0])?;
            tokens.push(Token { name: UNNAMED.into(), role: Role::All, token: words[0].clone() });
        }
        lines if lines.len() > MAX_TOKENS => {
            return Err(format!("holds {} tokens, must be at most {MAX_TOKENS}", lines.len()));
        }
        lines => {
            let (mut names, mut values) = (BTreeSet::new(), BTreeSet::new());
            for (number, words) in lines {
                let (name, token, role) = match words.as_slice() {
                    [name, token] => (name, token, "all"),
                    [name, token, role] => (name, token, str::from_utf8(role).unwrap_or_default()),
                    _ => return Err(format!("line {number}: {LINE}")),
                };
                let role = match role {
                    "read" => Role::Read,
                    "change" => Role::Change,
                    "all" => Role::All,
                    _ => return Err(format!("line {number}: {LINE}")),
                };
                check(token).map_err(|why| format!("line {number}: the token {why}"))?;
                if name.len() > MAX_NAME_BYTES || !name.iter().all(u8::is_ascii_graphic) {
                    return Err(format!(
                        "line {number}: the name must be 1 to {MAX_NAME_BYTES} visible ASCII characters"
                    ));
                }
                if !names.insert(name) || !values.insert(token) {
                    return Err(format!("line {number}: the name or the token is that of another line"));
                }
                let name = name.iter().copied().map(char::from).collect();
                tokens.push(Token { name, role, token: token.clone() });
            }
        }
    }
    Ok(Tokens(tokens))
}

fn check(token: &[u8]) -> Result<(), String> {
    if !BYTES.contains(&token.len()) {
        return Err(format!("holds {} characters, must be 16 to 4096", token.len()));
    }
    if !token.iter().all(u8::is_ascii_graphic) {
        return Err("must hold visible ASCII characters only".into());
    }
    Ok(())
}

/// The tokens that requests are compared with.
pub(super) struct Tokens(Vec<Token>);

impl Tokens {
    pub(super) fn one(token: String) -> Self {
        Self(vec![Token { name: UNNAMED.into(), role: Role::All, token: token.into_bytes() }])
    }

    /// The token that `Authorization` carries. The time depends on the length of the input and of the tokens,
    /// not on their contents.
    pub(super) fn bearer(&self, authorization: &[u8]) -> Option<&Token> {
        let (scheme, given) = authorization.split_at_checked(7)?;
        let given = given.trim_ascii();
        let mut bearer = None;
        // Every token is compared, whichever matches.
        for token in &self.0 {
            if bool::from(token.token.ct_eq(given)) {
                bearer = Some(token);
            }
        }
        bearer.filter(|_| scheme.eq_ignore_ascii_case(b"Bearer "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_token_is_admitted() {
        let tokens = Tokens::one("0123456789abcdef".into());
        let bearer = |text: &str| tokens.bearer(text.as_bytes()).map(|token| token.name.as_str());
        for admitted in ["Bearer 0123456789abcdef", "bearer  0123456789abcdef "] {
            assert_eq!(bearer(admitted), Some("token"), "{admitted}");
        }
        for refused in [
            "",
            "Bearer",
            "Bearer ",
            "0123456789abcdef",
            "Basic  0123456789abcdef",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdef0",
        ] {
            assert_eq!(bearer(refused), None, "{refused}");
        }
    }

    #[test]
    fn a_file_names_its_tokens() {
        let tokens = parse(b"alice 0123456789abcdef\r\n\n  ci\t0123456789ABCDEF read \n").map_err(|why| why.len());
        let tokens = tokens.unwrap_or_else(|_| panic!("it is well-formed"));
        let bearer = |text: &[u8]| tokens.bearer(text).map(|token| (token.name.as_str(), token.role));
        assert_eq!(bearer(b"Bearer 0123456789abcdef"), Some(("alice", Role::All)));
        assert_eq!(bearer(b"Bearer 0123456789ABCDEF"), Some(("ci", Role::Read)));
        assert_eq!(bearer(b"Bearer alice 0123456789abcdef"), None);
        assert_eq!(parse(b" \n0123456789abcdef\n").map(|tokens| tokens.0.len()), Ok(1));
        let many = (0..65).map(|n| format!("n{n} 0123456789abcde{n}\n")).collect::<String>();
        let long = format!("{} 0123456789abcdef", "n".repeat(65));
        let line = format!("line 1: {LINE}");
        for (text, why) in [
            ("", "holds 0 characters, must be 16 to 4096"),
            ("alice short", "line 1: the token holds 5 characters, must be 16 to 4096"),
            ("0123456789abcdef\n0123456789ABCDEF", &line),
            ("a 0123456789abcdef b", &line),
            ("a 0123456789abcdef read b", &line),
            ("a 0123456789abcdef\nb 0123456789abcdef", "line 2: the name or the token is that of another line"),
            ("a 0123456789abcdef\na 0123456789ABCDEF", "line 2: the name or the token is that of another line"),
            ("\u{e9} 0123456789abcdef", "line 1: the name must be 1 to 64 visible ASCII characters"),
            (&long, "line 1: the name must be 1 to 64 visible ASCII characters"),
            ("a 0123456789abcde\u{e9}", "line 1: the token must hold visible ASCII characters only"),
            (&many, "holds 65 tokens, must be at most 64"),
        ] {
            assert_eq!(parse(text.as_bytes()).map(|_| ()), Err(why.to_owned()), "{text:?}");
        }
    }
}
