use sha2::{Digest, Sha256};

use crate::Problem;

/// `sha256:` and the digest of the bytes in lower-case hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::from("sha256:"), |text, byte| text + &format!("{byte:02x}"))
}

/// Fails unless the bytes have the digest.
pub(crate) fn check(what: &str, bytes: &[u8], expected: &str) -> Result<(), Problem> {
    let found = sha256(bytes);
    if found == expected {
        return Ok(());
    }
    Err(Problem::WrongDigest { what: what.to_owned(), expected: expected.to_owned(), found })
}
