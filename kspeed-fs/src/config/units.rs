//! Sizes, durations and rates as users write them.

use std::time::Duration;

/// `512MiB`, `1GiB`, `2TB`, `4096`: bytes.
#[must_use]
pub fn parse_size(s: &str) -> Option<u64> {
    let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (number, unit) = s.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    if let Ok(n) = number.parse::<u64>() {
        return n.checked_mul(factor);
    }
    let n: f64 = number.parse().ok()?;
    let bytes = n * factor as f64;
    (bytes.is_finite() && (0.0..1e19).contains(&bytes)).then_some(bytes as u64)
}

/// `30s`, `500ms`, `1h 30m`; a bare number is seconds.
#[must_use]
pub fn parse_duration(s: &str) -> Option<Duration> {
    match s.parse::<u64>() {
        Ok(n) => Some(Duration::from_secs(n)),
        Err(_) => humantime::parse_duration(s).ok(),
    }
}

/// A size per second, or bits: `500MiB`, `500MiB/s`, `4Gbit`.
#[must_use]
pub fn parse_rate(s: &str) -> Option<u64> {
    let s = s.trim_end_matches("/s");
    let bytes = match s.strip_suffix("bit") {
        Some(b) => parse_size(&format!("{b}B"))? / 8,
        None => parse_size(s)?,
    };
    (bytes > 0).then_some(bytes)
}

/// A size for people.
#[must_use]
pub fn size_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut v = bytes as f64;
    let mut unit = 0;
    while v >= 1024.0 && unit + 1 < UNITS.len() {
        v /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{v:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(parse_size("512MiB"), Some(512 << 20));
        assert_eq!(parse_size("1.5G"), Some(3 << 29));
        assert_eq!(parse_size("2TB"), Some(2_000_000_000_000));
        assert_eq!(parse_size("4096"), Some(4096));
        for bad in ["", "x", "1XB", "-1", "1.2.3M", "99999999999TiB"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
        assert_eq!(parse_duration("30"), Some(Duration::from_secs(30)));
        assert_eq!(parse_duration("1h 30m"), Some(Duration::from_secs(5400)));
        assert_eq!(parse_rate("8Gbit"), Some(1_000_000_000));
        assert_eq!(parse_rate("100MiB/s"), Some(100 << 20));
        assert_eq!(parse_rate("0"), None);
        assert_eq!(size_text(3 << 29), "1.5 GiB");
    }
}
