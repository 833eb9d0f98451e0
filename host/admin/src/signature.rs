//! A minisign signature as one line, for an HTTP header.

/// The request header with the signature of a component: the lines of its `.minisig` file after the first, which is an
/// untrusted comment, joined by semicolons.
pub const SIGNATURE_HEADER: &str = "meridian-signature";

/// The value of [`SIGNATURE_HEADER`] for the text of a `.minisig` file.
///
/// ```
/// use meridian_admin::signature_header;
///
/// let file = "untrusted comment: of no use\nRUQf6L\ntrusted comment: file:a;b\ny/rUw2\n";
/// assert_eq!(signature_header(file), "RUQf6L;trusted comment: file:a;b;y/rUw2");
/// ```
#[must_use]
pub fn signature_header(text: &str) -> String {
    text.lines().skip(1).map(str::trim_end).collect::<Vec<_>>().join(";")
}

/// The text of the `.minisig` file that a header encodes. Malformed input stays malformed.
pub(super) fn signature_text(header: &[u8]) -> String {
    let header = String::from_utf8_lossy(header);
    // Base64 has no semicolon; a comment may have one.
    let lines = header.split_once(';').and_then(|(first, rest)| {
        let (comment, last) = rest.rsplit_once(';')?;
        Some([first, comment, last].map(str::trim).join("\n"))
    });
    format!("untrusted comment: from a header\n{}\n", lines.as_deref().unwrap_or(&header))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_keeps_what_is_signed() {
        let file = "untrusted comment: x\r\nRUQf6L/+=\r\ntrusted comment: file:a;b\tc\r\ny/rUw2==\r\n";
        let text = signature_text(signature_header(file).as_bytes());
        let lines: Vec<_> = text.lines().skip(1).collect();
        assert_eq!(lines, ["RUQf6L/+=", "trusted comment: file:a;b\tc", "y/rUw2=="]);
        for odd in [b"".as_slice(), b";", b"a;b", b"\xff;;;\xff"] {
            assert!(signature_text(odd).starts_with("untrusted comment: "));
        }
    }
}
