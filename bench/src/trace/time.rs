//! Times: units of numbers, and dates as text.

use std::str::FromStr;

/// The unit of times that are numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// Nanoseconds.
    Ns,
}

impl Unit {
    pub(super) fn per_second(self) -> f64 {
        match self {
            Self::S => 1.0,
            Self::Ms => 1e3,
            Self::Us => 1e6,
            Self::Ns => 1e9,
        }
    }
}

impl FromStr for Unit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "s" => Ok(Self::S),
            "ms" => Ok(Self::Ms),
            "us" => Ok(Self::Us),
            "ns" => Ok(Self::Ns),
            _ => Err("expected s, ms, us or ns".to_owned()),
        }
    }
}

/// Nanoseconds since 1970 of `YYYY-MM-DD hh:mm:ss[.fraction][Z|+hh:mm|-hh:mm]`, for the years 1970 to 2199.
pub(super) fn nanoseconds(text: &str) -> Option<i64> {
    if !text.is_ascii() || text.len() < 19 {
        return None;
    }
    let (date_time, rest) = text.split_at(19);
    let bytes = date_time.as_bytes();
    if (bytes[4], bytes[7], bytes[13], bytes[16]) != (b'-', b'-', b':', b':') || !matches!(bytes[10], b' ' | b'T') {
        return None;
    }
    let part = |range: std::ops::Range<usize>| digits(&date_time[range]);
    let (year, month, day) = (part(0..4)?, part(5..7)?, part(8..10)?);
    let (hour, minute, second) = (part(11..13)?, part(14..16)?, part(17..19)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days_in_month = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1970..2200).contains(&year) || !(1..=days_in_month).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let (fraction_ns, zone) = match rest.strip_prefix('.') {
        None => (0, rest),
        Some(rest) => {
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (fraction, zone) = rest.split_at(end);
            (digits(&format!("{:0<9.9}", Some(fraction).filter(|text| !text.is_empty())?))?, zone)
        }
    };
    let offset_s = match zone.as_bytes() {
        b"" | b"Z" => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) = (digits(&zone[1..3])?, digits(&zone[4..6])?);
            if hours > 23 || minutes > 59 {
                return None;
            }
            (hours * 3600 + minutes * 60) * if *sign == b'-' { -1 } else { 1 }
        }
        _ => return None,
    };
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset_s;
    Some(seconds * 1_000_000_000 + fraction_ns)
}

fn digits(text: &str) -> Option<i64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Days since 1970-01-01 in the Gregorian calendar, in years that start in March so that the leap day comes last
/// (<https://howardhinnant.github.io/date_algorithms.html#days_from_civil>).
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year - era * 400;
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_1970() {
        assert_eq!(nanoseconds("1970-01-01 00:00:00"), Some(0));
        assert_eq!(nanoseconds("2000-02-29T00:00:00.5Z"), Some(951_782_400_500_000_000));
        assert_eq!(nanoseconds("2024-05-10 00:00:00.009930+00:00"), Some(1_715_299_200_009_930_000));
        assert_eq!(nanoseconds("2024-05-10 02:00:00.009930+02:00"), nanoseconds("2024-05-10 00:00:00.009930"));
        assert_eq!(nanoseconds("2023-11-16 18:15:46.6805900"), Some(1_700_158_546_680_590_000));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46 UTC",
            "2023-11-16 18:15:46+1:00",
            "9999-01-01 00:00:00",
            "2023-11-16 +8:15:46",
        ] {
            assert_eq!(nanoseconds(text), None, "{text}");
        }
    }
}
