//! Which keys have a name in the tree, and which name. The rules, which
//! docs/semantics.md repeats:
//!
//! 1. A key is a path; `/` separates directories.
//! 2. A key with an empty component (`a//b`, `/lead`), a component `.` or `..`,
//!    one with a NUL byte, or one over 255 bytes, has no path: it is hidden,
//!    and counted. Everything else is visible byte for byte.
//! 3. A key that ends with `/` is a directory marker: the directory exists even
//!    when empty; bytes in the marker are not visible.
//! 4. If `blue` and `blue/x` exist, `blue` is a directory; the object `blue` is
//!    hidden.

/// Linux's limit of a directory entry, in bytes.
pub const NAME_MAX: usize = 255;
/// S3's limit of a key, in bytes.
pub const KEY_MAX: usize = 1024;

/// Whether a component of a key can be a name.
#[must_use]
pub fn is_visible(component: &[u8]) -> bool {
    !component.is_empty()
        && component != b"."
        && component != b".."
        && component.len() <= NAME_MAX
        && !component.contains(&0)
        && !component.contains(&b'/')
}

/// Whether every component of a key can be a name; a marker's last slash does
/// not count.
#[must_use]
pub fn is_path(key: &[u8]) -> bool {
    let key = key.strip_suffix(b"/").unwrap_or(key);
    key.split(|b| *b == b'/').all(is_visible)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// N1, N3: what has a path and what has none.
    #[test]
    fn n1_n3_the_rule_of_names() {
        for good in ["a", "a/b", "a/", "...", ".a", "a b", "a\n", "\u{13}", "🦀", &"n".repeat(255)]
        {
            assert!(is_path(good.as_bytes()), "{good:?}");
        }
        for bad in [
            "",
            "/",
            "/lead",
            "a//b",
            "a//",
            "./a",
            "a/./b",
            "a/../b",
            "..",
            "a\0",
            &"n".repeat(256),
        ] {
            assert!(!is_path(bad.as_bytes()), "{bad:?}");
        }
        assert!(is_path(b"\xff\xfe"), "names need not be UTF-8");
    }
}
