//! Buckets, objects and uploads, without HTTP.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use hyper::StatusCode;
use hyper::header::HeaderMap;

use super::content::Content;
use super::now;

/// A whole object.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) data: Content,
    /// In quotes.
    pub(super) etag: String,
    pub(super) generation: u64,
    pub(super) modified: SystemTime,
    /// Its media type, its user's metadata, and what else comes with an object and goes back as it
    /// came.
    pub(super) attributes: HeaderMap,
}

#[derive(Debug)]
struct Upload {
    key: String,
    attributes: HeaderMap,
    parts: BTreeMap<u32, (String, Content)>,
    started: SystemTime,
}

/// An upload that is neither complete nor aborted.
#[derive(Debug)]
pub(super) struct Unfinished {
    pub(super) key: String,
    pub(super) id: String,
    pub(super) started: SystemTime,
}

/// The condition of a write on the object that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    None,
    Absent,
    Generation(u64),
    /// In quotes.
    Etag(String),
}

/// One page of a listing.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) objects: Vec<(String, Object)>,
    pub(super) folders: Vec<String>,
    /// The start of the next page, if there is one.
    pub(super) next: Option<String>,
}

/// The reason that a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    NoSuchBucket,
    NoSuchKey,
    NoSuchUpload,
    PreconditionFailed,
    InvalidRange,
    InvalidPart,
    InvalidArgument,
    MalformedXml,
    MethodNotAllowed,
}

impl Failure {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::NoSuchBucket | Self::NoSuchKey | Self::NoSuchUpload => StatusCode::NOT_FOUND,
            Self::PreconditionFailed => StatusCode::PRECONDITION_FAILED,
            Self::InvalidRange => StatusCode::RANGE_NOT_SATISFIABLE,
            Self::InvalidPart | Self::InvalidArgument | Self::MalformedXml => {
                StatusCode::BAD_REQUEST
            }
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        }
    }

    /// The code and the message of the answer.
    pub(super) fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::NoSuchBucket => ("NoSuchBucket", "The specified bucket does not exist."),
            Self::NoSuchKey => ("NoSuchKey", "The specified key does not exist."),
            Self::NoSuchUpload => ("NoSuchUpload", "The requested upload was not found."),
            Self::PreconditionFailed => {
                ("PreconditionFailed", "At least one of the pre-conditions did not hold.")
            }
            Self::InvalidRange => ("InvalidRange", "The requested range cannot be satisfied."),
            Self::InvalidPart => ("InvalidPart", "A part was not found, or has another ETag."),
            Self::InvalidArgument => ("InvalidArgument", "Invalid argument."),
            Self::MalformedXml => ("MalformedXML", "The XML you provided was not well-formed."),
            Self::MethodNotAllowed => ("MethodNotAllowed", "The method is not allowed here."),
        }
    }
}

/// All buckets.
#[derive(Debug)]
pub(super) struct Objects(BTreeMap<String, Bucket>);

impl Objects {
    pub(super) fn with_buckets(names: &[&str]) -> Self {
        Self(names.iter().map(|name| ((*name).to_owned(), Bucket::default())).collect())
    }

    pub(super) fn bucket(&mut self, name: &str) -> Result<&mut Bucket, Failure> {
        self.0.get_mut(name).ok_or(Failure::NoSuchBucket)
    }

    pub(super) fn uploads(&self) -> usize {
        self.0.values().map(|bucket| bucket.uploads.len()).sum()
    }
}

/// The objects of one bucket.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, Upload>,
    /// The last number of a generation or an upload.
    last_number: u64,
}

impl Bucket {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn get(&self, key: &str, generation: Option<&str>) -> Result<&Object, Failure> {
        let object = self.objects.get(key).ok_or(Failure::NoSuchKey)?;
        let is_wanted =
            generation.is_none_or(|generation| generation == object.generation.to_string());
        // Older generations are not kept, as in a bucket without versions.
        is_wanted.then_some(object).ok_or(Failure::NoSuchKey)
    }

    fn check(&self, key: &str, condition: &Condition) -> Result<(), Failure> {
        let found = self.objects.get(key);
        let holds = match condition {
            Condition::None => true,
            Condition::Absent => found.is_none(),
            Condition::Generation(wanted) => found.is_some_and(|one| one.generation == *wanted),
            Condition::Etag(wanted) => found.is_some_and(|one| one.etag == *wanted),
        };
        holds.then_some(()).ok_or(Failure::PreconditionFailed)
    }

    pub(super) fn put(
        &mut self,
        key: &str,
        data: Content,
        attributes: HeaderMap,
        condition: &Condition,
    ) -> Result<Object, Failure> {
        self.check(key, condition)?;
        let generation = self.next_number();
        let etag = data.etag();
        let object = Object { data, etag, generation, modified: now(), attributes };
        self.objects.insert(key.to_owned(), object.clone());
        Ok(object)
    }

    pub(super) fn delete(&mut self, key: &str, condition: &Condition) -> Result<(), Failure> {
        self.check(key, condition)?;
        self.objects.remove(key).map(drop).ok_or(Failure::NoSuchKey)
    }

    /// Objects and, with a delimiter, folders whose names start with `prefix` and are behind
    /// `after`, `most` of them.
    pub(super) fn list(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
        after: Option<&str>,
        most: usize,
    ) -> Page {
        let (mut page, mut folders) = (Page::default(), BTreeSet::new());
        let mut last = None;
        let named = self.objects.range(prefix.to_owned()..);
        for (key, object) in named.take_while(|(key, _)| key.starts_with(prefix)) {
            let end = delimiter.filter(|text| !text.is_empty()).and_then(|delimiter| {
                Some(prefix.len() + key[prefix.len()..].find(delimiter)? + delimiter.len())
            });
            let entry = end.map_or(key.as_str(), |end| &key[..end]);
            if after.is_some_and(|after| entry <= after) || folders.contains(entry) {
                continue;
            }
            if page.objects.len() + folders.len() >= most {
                page.next = last;
                break;
            }
            last = Some(entry.to_owned());
            match end {
                Some(_) => drop(folders.insert(entry.to_owned())),
                None => page.objects.push((key.clone(), object.clone())),
            }
        }
        page.folders.extend(folders);
        page
    }

    pub(super) fn start_upload(&mut self, key: &str, attributes: HeaderMap) -> String {
        let id = format!("upload-{}", self.next_number());
        let upload =
            Upload { key: key.to_owned(), attributes, parts: BTreeMap::new(), started: now() };
        self.uploads.insert(id.clone(), upload);
        id
    }

    fn upload(&mut self, key: &str, id: &str) -> Result<&mut Upload, Failure> {
        let upload = self.uploads.get_mut(id).filter(|upload| upload.key == key);
        upload.ok_or(Failure::NoSuchUpload)
    }

    pub(super) fn put_part(
        &mut self,
        key: &str,
        id: &str,
        number: u32,
        data: Content,
    ) -> Result<String, Failure> {
        let etag = data.etag();
        self.upload(key, id)?.parts.insert(number, (etag.clone(), data));
        Ok(etag)
    }

    /// Makes an object of the parts that are named by number and ETag.
    pub(super) fn complete(
        &mut self,
        key: &str,
        id: &str,
        parts: &[(u32, String)],
        condition: &Condition,
    ) -> Result<Object, Failure> {
        let upload = self.upload(key, id)?;
        let is_ascending = parts.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if parts.is_empty() || !is_ascending {
            return Err(Failure::InvalidPart);
        }
        let mut data = Content::default();
        for (number, etag) in parts {
            let (found, part) = upload.parts.get(number).ok_or(Failure::InvalidPart)?;
            if found != etag {
                return Err(Failure::InvalidPart);
            }
            data.append(part);
        }
        let attributes = upload.attributes.clone();
        let object = self.put(key, data, attributes, condition)?;
        self.uploads.remove(id);
        Ok(object)
    }

    pub(super) fn abort(&mut self, key: &str, id: &str) -> Result<(), Failure> {
        self.upload(key, id)?;
        self.uploads.remove(id);
        Ok(())
    }

    pub(super) fn list_uploads(&self, prefix: Option<&str>) -> Vec<Unfinished> {
        let named = self.uploads.iter();
        let named = named.filter(|(_, upload)| prefix.is_none_or(|p| upload.key.starts_with(p)));
        named
            .map(|(id, upload)| Unfinished {
                key: upload.key.clone(),
                id: id.clone(),
                started: upload.started,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn text(text: &'static str) -> Content {
        Bytes::from(text).into()
    }

    fn read(bucket: &Bucket) -> Bytes {
        bucket.get("k", None).unwrap().data.to_bytes()
    }

    fn bucket(keys: &[&str]) -> Bucket {
        let mut bucket = Bucket::default();
        for key in keys {
            bucket.put(key, Content::default(), HeaderMap::new(), &Condition::None).unwrap();
        }
        bucket
    }

    #[test]
    fn pages_of_every_size_list_everything_once() {
        let bucket = bucket(&["a/1", "a/2", "a/b/1", "a/c/1", "a/c/2", "a/d", "b", "a-"]);
        for most in 1..10 {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let page = bucket.list("a/", Some("/"), after.as_deref(), most);
                assert!(page.objects.len() + page.folders.len() <= most);
                found.extend(page.objects.into_iter().map(|(key, _)| key));
                found.extend(page.folders);
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            found.sort();
            assert_eq!(found, ["a/1", "a/2", "a/b/", "a/c/", "a/d"], "pages of {most}");
        }
        let flat = bucket.list("", None, None, 1000);
        assert_eq!(flat.objects.len(), 8);
    }

    #[test]
    fn an_object_is_replaced_only_in_the_generation_that_was_named() {
        let mut bucket = bucket(&[]);
        let first = bucket.put("k", text("1"), HeaderMap::new(), &Condition::Absent).unwrap();
        let again = bucket.put("k", text("2"), HeaderMap::new(), &Condition::Absent);
        assert_eq!(again.unwrap_err(), Failure::PreconditionFailed);
        let known = Condition::Generation(first.generation);
        let second = bucket.put("k", text("2"), HeaderMap::new(), &known).unwrap();
        let late = bucket.put("k", text("3"), HeaderMap::new(), &known);
        assert_eq!(late.unwrap_err(), Failure::PreconditionFailed);
        assert_eq!(read(&bucket), "2");
        assert_ne!(first.etag, second.etag);
    }

    #[test]
    fn an_upload_is_visible_when_it_is_complete() {
        let mut bucket = bucket(&[]);
        let id = bucket.start_upload("k", HeaderMap::new());
        let two = bucket.put_part("k", &id, 2, text("b")).unwrap();
        let one = bucket.put_part("k", &id, 1, text("a")).unwrap();
        assert_eq!(bucket.get("k", None).unwrap_err(), Failure::NoSuchKey);
        let wrong = [(1, two.clone()), (2, one.clone())];
        let refused = bucket.complete("k", &id, &wrong, &Condition::None);
        assert_eq!(refused.unwrap_err(), Failure::InvalidPart);
        bucket.complete("k", &id, &[(1, one), (2, two)], &Condition::None).unwrap();
        assert_eq!(read(&bucket), "ab");
        assert_eq!(bucket.abort("k", &id).unwrap_err(), Failure::NoSuchUpload);
    }
}
