//! Encodes the report of a rank's write.

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::names::key::Key;
use crate::protocol::checkpoint::WriteReport;

impl WriteReport {
    /// Writes the report to a message, without the durations. A chunk takes about nine bytes.
    pub fn write_to(&self, out: &mut MessageWriter) {
        out.number(self.files.len() as u64);
        for (key, byte_len) in &self.files {
            out.text(key.as_str());
            out.number(*byte_len);
            out.bytes(self.sha256.get(key).map_or(&[], |digest| digest.as_slice()));
            let checksums = self.checksums.get(key).map_or(&[][..], Vec::as_slice);
            out.number(checksums.len() as u64);
            let mut last = 0_u64;
            for (offset, crc32) in checksums {
                // Chunks mostly are in the order of their offsets.
                out.number(offset.wrapping_sub(last));
                out.number((*crc32).into());
                last = *offset;
            }
            let stored = self.stored.get(key).map_or(&[][..], Vec::as_slice);
            out.number(stored.len() as u64);
            let (mut planned_last, mut end_last) = (0_u64, 0_u64);
            for (planned, range) in stored {
                out.number(planned.wrapping_sub(planned_last));
                out.number(range.start.wrapping_sub(end_last));
                out.number(range.end.wrapping_sub(range.start));
                (planned_last, end_last) = (*planned, range.end);
            }
        }
    }

    /// Reads a report from a message.
    ///
    /// # Errors
    ///
    /// When the message does not continue with a report of this version, or names a file that no
    /// storage has.
    pub fn read_from(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let mut report = Self::default();
        for _ in 0..input.count()? {
            let key = Key::new(input.text()?).map_err(|error| bad(error.to_string()))?;
            report.files.push((key.clone(), input.number()?));
            match input.bytes()? {
                [] => {}
                digest => {
                    let digest = digest.try_into().map_err(|_| bad("a hash of another length"))?;
                    report.sha256.insert(key.clone(), digest);
                }
            }
            let mut checksums = Vec::new();
            let mut last = 0_u64;
            for _ in 0..input.count()? {
                last = last.wrapping_add(input.number()?);
                checksums.push((last, input.small()?));
            }
            if !checksums.is_empty() {
                report.checksums.insert(key.clone(), checksums);
            }
            let mut stored = Vec::new();
            let (mut planned, mut end) = (0_u64, 0_u64);
            for _ in 0..input.count()? {
                planned = planned.wrapping_add(input.number()?);
                let start = end.wrapping_add(input.number()?);
                end = start.wrapping_add(input.number()?);
                stored.push((planned, start..end));
            }
            if !stored.is_empty() {
                report.stored.insert(key, stored);
            }
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proptest::prelude::*;

    use super::*;

    fn report() -> impl Strategy<Value = WriteReport> {
        let checksums = prop::collection::vec(any::<(u64, u32)>(), 0..4);
        let stored = prop::collection::vec(any::<(u64, Range<u64>)>(), 0..4);
        let file = (any::<u64>(), any::<Option<[u8; 32]>>(), checksums, stored);
        prop::collection::btree_map("[a-z_0-9]{1,20}", file, 0..4).prop_map(|files| {
            let mut report = WriteReport::default();
            for (name, (byte_len, sha256, checksums, stored)) in files {
                let key = Key::new(name).unwrap();
                report.files.push((key.clone(), byte_len));
                report.sha256.extend(sha256.map(|digest| (key.clone(), digest)));
                if !checksums.is_empty() {
                    report.checksums.insert(key.clone(), checksums);
                }
                if !stored.is_empty() {
                    report.stored.insert(key, stored);
                }
            }
            report
        })
    }

    proptest! {
        #[test]
        fn reports_arrive_as_they_were_sent(report in report()) {
            let mut message = MessageWriter::new(*b"rep1");
            report.write_to(&mut message);
            let message = message.finish();
            let read = |message: &[u8]| {
                let mut input = MessageReader::new(message, *b"rep1")?;
                let report = WriteReport::read_from(&mut input)?;
                input.finish().map(|()| report)
            };
            prop_assert_eq!(read(&message).unwrap(), report);
            for len in 0..message.len() {
                prop_assert!(read(&message[..len]).is_err(), "{}", len);
            }
        }
    }

    #[test]
    fn a_file_that_no_storage_has_is_refused() {
        let mut message = MessageWriter::new(*b"rep1");
        message.number(1);
        message.text("../outside");
        message.numbers(&[0, 0, 0, 0]);
        let message = message.finish();
        let mut input = MessageReader::new(&message, *b"rep1").unwrap();
        assert!(WriteReport::read_from(&mut input).is_err());
    }
}
