//! Numbers in few columns.

use dcp::jobs::stats::Number;

/// A number of a tensor; `-` where there is none.
pub(crate) fn compact(number: Option<Number>) -> String {
    match number {
        Some(Number::Int(n)) if n.unsigned_abs() < 10_000_000 => n.to_string(),
        Some(number) => float(number.as_f64()),
        None => "-".to_owned(),
    }
}

/// At most ten columns: whole numbers as they are, others with four digits.
pub(crate) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let magnitude = x.abs();
    if x == x.trunc() && magnitude < 1e6 {
        // Without the sign of a zero.
        return format!("{:.0}", x + 0.0);
    }
    if (1e-3..1e5).contains(&magnitude) {
        let digits = match magnitude {
            m if m < 0.1 => 5,
            m if m < 10.0 => 4,
            m if m < 100.0 => 3,
            m if m < 1000.0 => 2,
            _ => 1,
        };
        return format!("{x:.digits$}");
    }
    let text = format!("{x:.3e}");
    let Some((digits, power)) = text.split_once('e') else { return text };
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
    format!("{digits}e{sign}{power:0>2}")
}

/// A part of all as percents, never rounded to nothing or everything.
pub(crate) fn share(part: u64, all: u64) -> String {
    let percent = part as f64 / all.max(1) as f64 * 100.0;
    if part == 0 || part == all {
        format!("{percent:.0}%")
    } else if percent < 0.1 {
        "<0.1%".to_owned()
    } else if percent > 99.9 {
        ">99.9%".to_owned()
    } else {
        format!("{percent:.1}%")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (x, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (127.0, "127"),
            (-2.113_665, "-2.1137"),
            (0.0123, "0.01230"),
            (12345.6, "12345.6"),
            (1e-7, "1.000e-07"),
            (-1.5e300, "-1.500e+300"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(x), text);
        }
        assert_eq!(compact(Some(Number::Int(-5))), "-5");
        assert_eq!(compact(Some(Number::Int(i64::MAX.into()))), "9.223e+18");
        assert_eq!(compact(None), "-");
    }

    #[test]
    fn shares_do_not_lie() {
        assert_eq!(share(0, 10), "0%");
        assert_eq!(share(10, 10), "100%");
        assert_eq!(share(1, 1_000_000), "<0.1%");
        assert_eq!(share(999_999, 1_000_000), ">99.9%");
        assert_eq!(share(1, 3), "33.3%");
        assert_eq!(share(0, 0), "0%");
    }
}
