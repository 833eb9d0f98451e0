//! The bearer token that changes need.

use std::path::Path;

use subtle::ConstantTimeEq;

use crate::private;

const BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

/// Read the token from a file of this user of mode 0600: 16 to 4096 visible ASCII characters, with optional white space
/// around them.
///
/// # Errors
/// The problem and the expectation; the text follows the path, and never includes the contents.
pub fn read_token(path: &Path) -> Result<String, String> {
    // Room for the white space.
    let bytes = private::read(path, BYTES.end() + 64)?;
    let token = bytes.trim_ascii();
    if !BYTES.contains(&token.len()) {
        return Err(format!("holds {} characters, must be 16 to 4096", token.len()));
    }
    if !token.iter().all(u8::is_ascii_graphic) {
        return Err("must hold visible ASCII characters only".into());
    }
    Ok(token.iter().copied().map(char::from).collect())
}

/// The token that requests are compared with. It is never shown: there is no `Debug`.
pub(super) struct Token(Vec<u8>);

impl Token {
    pub(super) fn new(token: String) -> Self {
        Self(token.into_bytes())
    }

    /// Whether `Authorization` carries this token. The time depends on the length of the input, not on its contents.
    pub(super) fn admits(&self, authorization: &[u8]) -> bool {
        let Some((scheme, given)) = authorization.split_at_checked(7) else { return false };
        scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(self.0.ct_eq(given.trim_ascii()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_token_is_admitted() {
        let token = Token::new("0123456789abcdef".into());
        for admitted in ["Bearer 0123456789abcdef", "bearer  0123456789abcdef "] {
            assert!(token.admits(admitted.as_bytes()), "{admitted}");
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
            assert!(!token.admits(refused.as_bytes()), "{refused}");
        }
    }
}
