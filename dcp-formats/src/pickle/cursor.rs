//! Reads the operands of opcodes.

use std::borrow::Cow;

use dcp_core::FormatError;

/// CPython (3.11 and later) refuses longer decimal integers, which take quadratic time to parse.
const DECIMAL_DIGITS_MAX: usize = 4300;

/// A position in the input.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    input: &'a [u8],
    at: usize,
}

/// An integer; one that exceeds 64 bits is little-endian two's complement.
#[derive(Debug, PartialEq)]
pub(super) enum Integer {
    Small(i64),
    Big(Box<[u8]>),
}

impl<'a> Cursor<'a> {
    pub(super) fn new(input: &'a [u8]) -> Self {
        Self { input, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn input_len(&self) -> usize {
        self.input.len()
    }

    /// Returns the bytes after the position.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.input.get(self.at..).unwrap_or_default()
    }

    pub(super) fn bad(&self, problem: impl Into<String>) -> FormatError {
        FormatError::new("pickle", problem).at(self.at as u64)
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        let rest = self.rest();
        let taken = rest
            .get(..len)
            .ok_or_else(|| self.bad(format!("{len} bytes are claimed, {} are left", rest.len())))?;
        self.at += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| self.bad("an operand is cut off"))
    }

    pub(super) fn u8(&mut self) -> Result<u8, FormatError> {
        let byte = self.input.get(self.at).copied();
        let byte = byte.ok_or_else(|| self.bad("it ends early"))?;
        self.at += 1;
        Ok(byte)
    }

    /// Reads bytes with a length prefix of `N` bytes.
    pub(super) fn sized<const N: usize>(&mut self) -> Result<&'a [u8], FormatError> {
        let mut len = [0; 8];
        let prefix = self.array::<N>()?;
        for (to, from) in len.iter_mut().zip(prefix) {
            *to = from;
        }
        let len = u64::from_le_bytes(len);
        // `BINSTRING` and `LONG4` have signed lengths; negative ones are errors like too large
        // ones.
        let len = usize::try_from(len)
            .map_err(|_| self.bad(format!("{len} bytes are claimed, far more than there are")))?;
        self.take(len)
    }

    /// Reads text up to a line feed, which is consumed but not returned.
    pub(super) fn line(&mut self) -> Result<&'a [u8], FormatError> {
        let rest = self.rest();
        let len = rest
            .iter()
            .position(|byte| *byte == b'\n')
            .ok_or_else(|| self.bad("a line does not end"))?;
        self.at += len + 1;
        Ok(rest.get(..len).unwrap_or_default())
    }

    pub(super) fn utf8_line(&mut self) -> Result<&'a str, FormatError> {
        let line = self.line()?;
        str::from_utf8(line).map_err(|_| self.bad("a name is not UTF-8"))
    }

    /// Parses the number in a line.
    pub(super) fn decimal(&self, line: &str) -> Result<Integer, FormatError> {
        let line = line.trim();
        let digits = line.strip_suffix('L').unwrap_or(line);
        decimal(digits).ok_or_else(|| self.bad("a decimal integer is malformed or too long"))
    }

    pub(super) fn decimal_float(&mut self) -> Result<f64, FormatError> {
        let line = self.utf8_line()?;
        line.trim().parse().map_err(|_| self.bad("a decimal float is malformed"))
    }

    /// Reads a memo index on a line of its own.
    pub(super) fn memo_index(&mut self) -> Result<u64, FormatError> {
        let line = self.utf8_line()?;
        line.trim().parse().map_err(|_| self.bad("a memo index is malformed"))
    }
}

/// Decodes little-endian two's complement of any length.
pub(super) fn long(bytes: &[u8]) -> Integer {
    let Some(last) = bytes.last() else { return Integer::Small(0) };
    let mut all = if *last >= 0x80 { [0xff; 8] } else { [0; 8] };
    match all.get_mut(..bytes.len()) {
        Some(low) => {
            low.copy_from_slice(bytes);
            Integer::Small(i64::from_le_bytes(all))
        }
        None => {
            let big = dcp_core::value::BigInt::from_le_bytes(bytes.to_vec());
            match big.to_i64() {
                Some(small) => Integer::Small(small),
                None => Integer::Big(Box::from(&**big.to_le_bytes())),
            }
        }
    }
}

fn decimal(text: &str) -> Option<Integer> {
    if let Ok(small) = text.parse() {
        return Some(Integer::Small(small));
    }
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let valid = digits.bytes().all(|b| b.is_ascii_digit());
    if digits.is_empty() || digits.len() > DECIMAL_DIGITS_MAX || !valid {
        return None;
    }
    let mut magnitude: Vec<u8> = Vec::new();
    for digit in digits.bytes().map(|b| b - b'0') {
        let mut carry = u16::from(digit);
        for byte in &mut magnitude {
            let n = u16::from(*byte) * 10 + carry;
            *byte = (n & 0xff) as u8;
            carry = n >> 8;
        }
        if carry != 0 {
            magnitude.push(carry as u8);
        }
    }
    magnitude.push(0);
    if negative {
        let mut carry = true;
        for byte in &mut magnitude {
            (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
        }
    }
    Some(long(&magnitude))
}

/// Decodes a quoted `STRING` operand with Python 2's escapes.
pub(super) fn unquote(line: &[u8]) -> Option<Cow<'_, [u8]>> {
    let inner = match line.trim_ascii_end() {
        [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => inner,
        _ => return None,
    };
    if !inner.contains(&b'\\') {
        return Some(Cow::Borrowed(inner));
    }
    let mut out = Vec::with_capacity(inner.len());
    let mut rest = inner;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&escape, after) = rest.split_first()?;
        rest = after;
        match escape {
            b'\\' | b'\'' | b'"' => out.push(escape),
            b'n' => out.push(b'\n'),
            b'r' => out.push(b'\r'),
            b't' => out.push(b'\t'),
            b'a' => out.push(7),
            b'b' => out.push(8),
            b'v' => out.push(11),
            b'f' => out.push(12),
            b'x' => {
                let (digits, after) = rest.split_at_checked(2)?;
                out.push(u8::try_from(hex(digits)?).ok()?);
                rest = after;
            }
            b'0'..=b'7' => {
                let more = rest.iter().take(2).take_while(|b| (b'0'..=b'7').contains(*b)).count();
                let (digits, after) = rest.split_at_checked(more)?;
                let value = digits
                    .iter()
                    .fold(u32::from(escape - b'0'), |n, d| n * 8 + u32::from(d - b'0'));
                out.push((value & 0xff) as u8);
                rest = after;
            }
            _ => out.extend([b'\\', escape]),
        }
    }
    Some(Cow::Owned(out))
}

/// Decodes a `UNICODE` operand: Latin-1 with `\u` escapes.
pub(super) fn raw_unicode_escape(line: &[u8]) -> Option<String> {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    let mut high: Option<u32> = None;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let mut code = u32::from(byte);
        if byte == b'\\' {
            let len = match rest.first() {
                Some(b'u') => 4,
                Some(b'U') => 8,
                _ => 0,
            };
            if len > 0 {
                code = hex(rest.get(1..=len)?)?;
                rest = rest.get(len + 1..)?;
            }
        }
        // A pair of surrogates is one character; a lone surrogate is invalid.
        code = match (high.take(), code) {
            (None, 0xd800..=0xdbff) => {
                high = Some(code);
                continue;
            }
            (Some(high), 0xdc00..=0xdfff) => 0x10000 + ((high - 0xd800) << 10) + (code - 0xdc00),
            (Some(_), _) => return None,
            (None, code) => code,
        };
        out.push(char::from_u32(code)?);
    }
    high.is_none().then_some(out)
}

fn hex(digits: &[u8]) -> Option<u32> {
    digits
        .iter()
        .try_fold(0_u32, |n, digit| Some(n.checked_mul(16)? + char::from(*digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_of_any_size() {
        let big = |n: &str| match decimal(n) {
            Some(Integer::Big(bytes)) => {
                dcp_core::value::BigInt::from_le_bytes(bytes.to_vec()).to_string()
            }
            Some(Integer::Small(n)) => n.to_string(),
            None => "?".into(),
        };
        for n in ["0", "-9223372036854775808", "9223372036854775808", "-1180591620717411303424"] {
            assert_eq!(big(n), n);
        }
        assert_eq!(big("0x10"), "?");
        assert_eq!(big(&"9".repeat(4301)), "?");
    }

    #[test]
    fn escapes_of_protocol_0() {
        assert_eq!(unquote(br"'a\'\x00\101\n\q'").unwrap(), &b"a'\0A\n\\q"[..]);
        assert_eq!(unquote(b"'a"), None);
        assert_eq!(raw_unicode_escape(b"h\xe9\\u20ac\\ud83d\\ude00\\n").unwrap(), "hé€😀\\n");
        assert_eq!(raw_unicode_escape(b"\\ud83d"), None);
    }

    #[test]
    fn negative_and_huge_lengths_are_refused() {
        assert!(Cursor::new(&[0xff; 12]).sized::<4>().is_err());
        assert!(Cursor::new(&[0, 0, 0, 0, 0, 0, 0, 0x10]).sized::<8>().is_err());
    }
}
