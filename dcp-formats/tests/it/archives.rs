//! Archives: layout of large ones, and refusal of bad ones.

use std::io::Write as _;

use bytes::Bytes;
use dcp_core::DType;
use dcp_formats::torch_tensor::{TensorBlob, TensorLayout};
use dcp_formats::torch_zip::{
    ALIGNMENT, ArchiveEncoder, ArchiveIndex, Method, ParseStep, RecordSet, Sparse,
};
use flate2::{Compression, write::DeflateEncoder};
use proptest::prelude::*;

fn small(storage: &[u8]) -> Vec<u8> {
    ArchiveEncoder::encode(RecordSet::default(), &b"\x80\x02N."[..], &[storage]).unwrap().to_vec()
}

fn parse(archive: &[u8]) -> Result<ArchiveIndex, String> {
    ArchiveIndex::parse(&Sparse::whole(archive))
        .and_then(ParseStep::ready)
        .map_err(|error| error.to_string())
}

/// Where the entry of a record begins in the central directory.
fn central(archive: &[u8], name: &str) -> usize {
    let name = format!("archive/{name}");
    archive.windows(name.len()).rposition(|window| window == name.as_bytes()).unwrap() - 46
}

fn patched(archive: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut archive = archive.to_vec();
    archive[at..at + bytes.len()].copy_from_slice(bytes);
    archive
}

fn content(archive: &[u8], name: &str) -> Result<Vec<u8>, String> {
    let index = parse(archive)?;
    let entry = index.require(name).map_err(|error| error.to_string())?;
    let record = entry.locate(&Sparse::whole(archive)).and_then(ParseStep::ready);
    let record = record.map_err(|error| error.to_string())?;
    let kept = &archive[record.data.start as usize..record.data.end as usize];
    record.decode(kept, 1 << 20).map(Into::into).map_err(|error| error.to_string())
}

#[test]
fn t04_crc_is_checked() {
    let archive = small(&[7; 1000]);
    assert_eq!(content(&archive, "data/0").unwrap(), [7; 1000]);
    let at = archive.windows(8).position(|window| window == [7; 8]).unwrap();
    let error = content(&patched(&archive, at + 500, &[6]), "data/0").unwrap_err();
    assert!(error.contains("CRC-32") && error.contains(&format!("byte {at}")), "{error}");
    // Zero marks a CRC that was not computed.
    let without = patched(&patched(&archive, at, &[6]), central(&archive, "data/0") + 16, &[0; 4]);
    assert_eq!(content(&without, "data/0").unwrap()[0], 6);
}

/// Everything but the data of the storages, which may be larger than memory.
fn frame(encoder: &ArchiveEncoder, crcs: &[u32]) -> Vec<(u64, Bytes)> {
    let mut parts = vec![(0, encoder.head())];
    for (n, slot) in encoder.storages().iter().enumerate() {
        let end = slot.byte_offset + slot.byte_len;
        let next = encoder.between(n, crcs[n]);
        if n + 1 < crcs.len() {
            assert_eq!(end + next.len() as u64, encoder.storages()[n + 1].byte_offset);
            parts.push((end, next));
        } else {
            assert!(next.is_empty());
            parts.push((end, encoder.tail(crcs)));
        }
    }
    let (at, last) = parts.last().unwrap();
    assert_eq!(at + last.len() as u64, encoder.byte_len());
    parts
}

#[test]
fn f04_zip64_fields_of_a_storage_beyond_4_gib() {
    const LEN: u64 = 4_294_967_396;
    let pickle = TensorLayout::contiguous(DType::UInt8, [LEN]).unwrap().to_pickle().unwrap();
    let encoder = ArchiveEncoder::new(RecordSet::default(), pickle, &[LEN]).unwrap();
    let parts = frame(&encoder, &[0x1234_5678]);
    let (head, tail) = (&parts[0].1, &parts[1].1);
    assert_eq!(head.len(), 704);

    let mut header = b"archive/data/0\x01\0\x10\0".to_vec();
    header.extend(LEN.to_le_bytes());
    header.extend([0; 8]);
    header.extend(b"FB\x26\0");
    header.extend([b'Z'; 38]);
    assert!(head.ends_with(&header));

    let mut descriptor = b"PK\x07\x08\x78\x56\x34\x12".to_vec();
    descriptor.extend(LEN.to_le_bytes());
    descriptor.extend(LEN.to_le_bytes());
    assert!(tail.starts_with(&descriptor));
    let version_at = 704 + LEN + 24;
    let mut version = b"archive/version\x01\0\x08\0".to_vec();
    version.extend(version_at.to_le_bytes());
    version.extend(b"FB\x07\0ZZZZZZZ3\n");
    version.extend(b"PK\x07\x08");
    assert_eq!(&tail[24 + 30..24 + 30 + version.len()], version);
    assert!(tail.windows(24).any(|w| w.ends_with(b"\xff\xff\xff\xff\0\0") && w[2] == b'P'));

    let mut sparse = Sparse::new(encoder.byte_len());
    for (at, bytes) in &parts {
        sparse = sparse.with(*at, bytes);
    }
    let blob = TensorBlob::parse(&sparse).unwrap().ready().unwrap();
    assert_eq!(blob.element_range(), Some(704..704 + LEN));
    assert_eq!(blob.storage().crc32, Some(0x1234_5678));
    let located = TensorBlob::locate_from_head(head, encoder.byte_len()).unwrap();
    assert_eq!(located.element_range(), blob.element_range());
}

#[test]
fn storages_large_and_far_have_both_fields() {
    const LEN: u64 = 5 << 30;
    let lens = [LEN, 0, LEN, 7];
    let encoder = ArchiveEncoder::new(RecordSet::default(), &b"\x80\x02N."[..], &lens).unwrap();
    let parts = frame(&encoder, &[1, 0, 2, 3]);
    let mut sparse = Sparse::new(encoder.byte_len());
    for (at, bytes) in &parts {
        sparse = sparse.with(*at, bytes);
    }
    let index = ArchiveIndex::parse(&sparse).unwrap().ready().unwrap();
    for (n, slot) in encoder.storages().iter().enumerate() {
        let record =
            index.require(&format!("data/{n}")).unwrap().locate(&sparse).unwrap().ready().unwrap();
        assert_eq!(record.data, slot.byte_offset..slot.byte_offset + slot.byte_len);
        assert_eq!(slot.byte_offset % ALIGNMENT, 0);
    }
    assert!(ArchiveEncoder::new(RecordSet::default(), Bytes::new(), &[u64::MAX, 1]).is_err());
    assert!(ArchiveEncoder::new(RecordSet::default(), Bytes::new(), &[u64::MAX - 100]).is_err());
}

#[test]
fn a_tail_that_is_too_short_says_what_it_needs() {
    let archive = small(&[1; 5000]);
    let len = archive.len() as u64;
    let mut from = len;
    let index = loop {
        match ArchiveIndex::from_tail(&archive[from as usize..], len).unwrap() {
            ParseStep::Ready(index) => break index,
            ParseStep::Need(range) => {
                assert!(range.start < from);
                from = range.start;
            }
        }
    };
    assert!(from > len - 1000);
    let entry = index.require("data/0").unwrap();
    let header = entry.header_range();
    let record = entry.data_range(&archive[header.start as usize..header.end as usize]).unwrap();
    assert_eq!((record.byte_len, record.method), (5000, Method::Stored));
    assert!(entry.data_range(&archive[header.start as usize..header.end as usize - 1]).is_err());
}

#[test]
fn archives_of_others_are_read() {
    // One record, deflated, no alignment, no zip64, with a comment: as a zip library writes it.
    let mut deflate = DeflateEncoder::new(Vec::new(), Compression::default());
    deflate.write_all(&[5; 3000]).unwrap();
    let kept = deflate.finish().unwrap();
    let crc = crc32fast::hash(&[5; 3000]);
    let name = b"x/data.pkl";
    let fixed = |out: &mut Vec<u8>| {
        out.extend([20, 0, 0, 0, 8, 0, 0, 0, 0, 0]);
        out.extend(crc.to_le_bytes());
        out.extend((kept.len() as u32).to_le_bytes());
        out.extend(3000_u32.to_le_bytes());
        out.extend((name.len() as u16).to_le_bytes());
        out.extend([0, 0]);
    };
    let mut archive = b"PK\x03\x04".to_vec();
    fixed(&mut archive);
    archive.extend(name);
    archive.extend(&kept);
    let directory = archive.len();
    archive.extend(b"PK\x01\x02\x14\0");
    fixed(&mut archive);
    archive.extend([0; 14]);
    archive.extend(name);
    let directory_len = archive.len() - directory;
    archive.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
    archive.extend((directory_len as u32).to_le_bytes());
    archive.extend((directory as u32).to_le_bytes());
    archive.extend(b"\x05\0hello");

    assert_eq!(content(&archive, "data.pkl").unwrap(), [5; 3000]);
    assert_eq!(parse(&archive).unwrap().root(), "x");
    let index = parse(&archive).unwrap();
    let record = index.require("data.pkl").unwrap().locate(&Sparse::whole(&archive)).unwrap();
    let record = record.ready().unwrap();
    let kept = &archive[record.data.start as usize..record.data.end as usize];
    assert!(record.decode(kept, 2999).unwrap_err().problem().contains("at most 2999"));

    // A length that the data does not reach, one it exceeds, and one that nothing could reach.
    for (len, expected) in
        [(3001_u32, "stops at 3000"), (2999, "2999 bytes"), (1 << 30, "possible")]
    {
        let lie = patched(&archive, directory + 24, &len.to_le_bytes());
        let error = content(&lie, "data.pkl").unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let encrypted = patched(&archive, directory + 8, &[1]);
    assert!(parse(&encrypted).unwrap_err().contains("encrypted"));
    let unknown = patched(&archive, directory + 10, &[12]);
    assert!(parse(&unknown).unwrap_err().contains("unknown method 12"));
}

#[test]
fn directories_that_make_no_sense_are_refused() {
    let archive = small(&[9; 300]);
    let (pickle, storage) = (central(&archive, "data.pkl"), central(&archive, "data/0"));
    let cases: &[(usize, &[u8], &str)] = &[
        // Two records over the same bytes.
        (storage + 42, &[0, 0, 0, 0], "reaches into"),
        (pickle + 42, &[200, 1, 0, 0], "reaches into"),
        // Past the end.
        (storage + 42, &[0, 0, 0, 0x7f], "reaches into"),
        (storage + 20, &[0, 0, 0, 0x7f], "two different lengths"),
        (storage + 20, &[0, 0, 0, 0x7f, 0, 0, 0, 0x7f], "reaches into"),
        // A zip64 mark without a field.
        (storage + 20, &[0xff; 8], "zip64"),
        // A name cut off or twice.
        (storage + 28, &[0xff, 0xff], "cut off"),
        (storage, b"PK\x01\x03", "damaged"),
    ];
    for (at, bytes, expected) in cases {
        let error = parse(&patched(&archive, *at, bytes)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let len = archive.len();
    for (at, expected) in
        [(len - 98 + 32, "damaged"), (len - 98 + 48, "disagree"), (len - 42 + 8, "zip64")]
    {
        let error = parse(&patched(&archive, at, &[77])).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    assert!(parse(b"PK\x03\x04").unwrap_err().contains("too short"));
    assert!(parse(&[0; 100]).unwrap_err().contains("no end record"));
}

#[test]
fn two_records_of_one_name_are_refused() {
    // Storages "10" and "11" have names of one length.
    let storages = [&b"a"[..]; 12];
    let archive =
        ArchiveEncoder::encode(RecordSet::default(), &b"\x80\x02N."[..], &storages).unwrap();
    let at = central(&archive, "data/11");
    let error = parse(&patched(&archive, at + 46, b"archive/data/10")).unwrap_err();
    assert!(error.contains("two records"), "{error}");
}

#[test]
fn a_local_header_must_agree_with_the_directory() {
    let archive = small(&[9; 300]);
    let at = archive.windows(14).position(|window| window == b"archive/data/0").unwrap();
    for (at, byte) in [(at - 30, b'Q'), (at + 13, b'1'), (at - 22, 8), (at - 1, 0xff)] {
        let error = content(&patched(&archive, at, &[byte]), "data/0").unwrap_err();
        assert!(error.contains("disagree"), "{error}");
    }
}

#[test]
fn f15_a_storage_must_be_as_long_as_the_pickle_says() {
    let pickle = TensorLayout::contiguous(DType::Int32, [4]).unwrap().to_pickle().unwrap();
    let archive = ArchiveEncoder::encode(RecordSet::default(), pickle, &[&[0; 12]]).unwrap();
    let error = TensorBlob::parse(&Sparse::whole(&archive)).unwrap_err();
    assert!(error.problem().contains("12 bytes") && error.problem().contains("16"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read(
        pickle in proptest::collection::vec(any::<u8>(), 0..300),
        storages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..4),
        new in any::<bool>(),
    ) {
        let records = if new { RecordSet::Torch2_7 } else { RecordSet::Torch2_1 };
        let slices: Vec<&[u8]> = storages.iter().map(Vec::as_slice).collect();
        let archive = ArchiveEncoder::encode(records, pickle.clone(), &slices).unwrap();
        let lens: Vec<_> = storages.iter().map(|s| s.len() as u64).collect();
        let encoder = ArchiveEncoder::new(records, pickle.clone(), &lens).unwrap();
        prop_assert_eq!(archive.len() as u64, encoder.byte_len());
        prop_assert_eq!(content(&archive, "data.pkl").unwrap(), pickle);
        for (n, storage) in storages.iter().enumerate() {
            prop_assert_eq!(&content(&archive, &format!("data/{n}")).unwrap(), storage);
        }
        prop_assert_eq!(parse(&archive).unwrap().entries().len(), storages.len() + if new { 6 } else { 4 });
    }
}
