//! Token ids out of a JSON document, without a Python object per token.
//!
//! Strategy. One scan finds the `token_ids` array of the top-level object, parses it into packed little-endian u32 and
//! cuts it out of the document, leaving `[0]` in its place: whatever decodes the rest still judges everything else,
//! including whether the document is well formed. Wherever the array or the scan is not of the plainest kind the
//! answer is None, and the caller decodes the whole document in its usual way, which also words every error.

const KEY: &[u8] = b"token_ids";
pub const PLACEHOLDER: &[u8] = b"[0]";

pub struct Split {
    /// Packed little-endian u32.
    pub tokens: Vec<u8>,
    /// Where the array was.
    pub start: usize,
    pub stop: usize,
}

/// The `token_ids` array of the top-level object, if it is a non-empty array of at most `max_tokens` plain integers.
pub fn split(doc: &[u8], max_tokens: usize) -> Option<Split> {
    let mut at = skip_space(doc, 0);
    if doc.get(at) != Some(&b'{') {
        return None;
    }
    at += 1;
    let mut depth = 1usize;
    let mut expects_key = true;
    let mut found: Option<Split> = None;
    while depth > 0 {
        at = skip_space(doc, at);
        match *doc.get(at)? {
            b'"' => {
                let (stop, escaped) = string_end(doc, at + 1)?;
                let is_key = depth == 1 && expects_key;
                if is_key {
                    if escaped {
                        return None; // it may spell our key
                    }
                    if &doc[at + 1..stop] == KEY {
                        if found.is_some() {
                            return None;
                        }
                        let colon = skip_space(doc, stop + 1);
                        if doc.get(colon) != Some(&b':') {
                            return None;
                        }
                        let start = skip_space(doc, colon + 1);
                        let (tokens, end) = integers(doc, start, max_tokens)?;
                        found = Some(Split { tokens, start, stop: end });
                        at = end;
                        expects_key = false;
                        continue;
                    }
                    expects_key = false;
                }
                at = stop + 1;
            }
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' => {
                depth -= 1;
                at += 1;
            }
            b',' => {
                expects_key = depth == 1;
                at += 1;
            }
            _ => at += 1,
        }
    }
    found
}

fn skip_space(doc: &[u8], mut at: usize) -> usize {
    while matches!(doc.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

/// Index of the closing quote, and whether anything in between is escaped.
fn string_end(doc: &[u8], mut at: usize) -> Option<(usize, bool)> {
    let mut escaped = false;
    loop {
        match *doc.get(at)? {
            b'"' => return Some((at, escaped)),
            b'\\' => {
                escaped = true;
                at += 2;
            }
            _ => at += 1,
        }
    }
}

/// A JSON array of integers in [0, 2^32) as packed bytes, and the index after its bracket.
fn integers(doc: &[u8], start: usize, max_tokens: usize) -> Option<(Vec<u8>, usize)> {
    if doc.get(start) != Some(&b'[') {
        return None;
    }
    let mut at = start + 1;
    let mut packed = Vec::with_capacity((doc.len() - start).min(4 * max_tokens) / 4 * 3 + 16);
    loop {
        at = skip_space(doc, at);
        let (value, digits) = number(&doc[at..])?;
        packed.extend_from_slice(&value.to_le_bytes());
        if packed.len() > 4 * max_tokens {
            return None;
        }
        at += digits;
        // `, ` and `,` are what serializers write.
        match *doc.get(at)? {
            b',' => at += 1,
            b']' => return Some((packed, at + 1)),
            _ => {
                at = skip_space(doc, at);
                match *doc.get(at)? {
                    b',' => at += 1,
                    b']' => return Some((packed, at + 1)),
                    _ => return None,
                }
            }
        }
    }
}

/// A plain integer at the start of `text`, and how many digits it has.
fn number(text: &[u8]) -> Option<(u32, usize)> {
    if let Some(head) = text.first_chunk::<8>() {
        let word = u64::from_le_bytes(*head);
        // 0x80 in every byte that is no digit, the lowest one first.
        let low = word ^ 0x3030_3030_3030_3030;
        let not_digit = ((low.wrapping_add(0x7676_7676_7676_7676)) | low) & 0x8080_8080_8080_8080;
        let digits = (not_digit.trailing_zeros() / 8) as usize;
        if (1..8).contains(&digits) {
            if digits > 1 && head[0] == b'0' {
                return None;
            }
            // Right-align the digits and add them up pairwise.
            let mut v = low << (64 - 8 * digits);
            v = (v.wrapping_mul(10)).wrapping_add(v >> 8) & 0x00FF_00FF_00FF_00FF;
            v = (v.wrapping_mul(100)).wrapping_add(v >> 16) & 0x0000_FFFF_0000_FFFF;
            v = (v.wrapping_mul(10_000)).wrapping_add(v >> 32) & 0xFFFF_FFFF;
            return Some((v as u32, digits));
        }
    }
    let digits = text.iter().take(11).take_while(|c| c.is_ascii_digit()).count();
    if digits == 0 || digits > 10 || (digits > 1 && text[0] == b'0') {
        return None;
    }
    let value = text[..digits].iter().fold(0u64, |sum, c| sum * 10 + u64::from(c - b'0'));
    u32::try_from(value).ok().map(|value| (value, digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(doc: &str) -> Option<Vec<u32>> {
        split(doc.as_bytes(), 1000)
            .map(|s| s.tokens.chunks(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect())
    }

    #[test]
    fn every_length_of_number() {
        for digits in 1..=10u32 {
            let value = (10u64.pow(digits) - 1).min(u64::from(u32::MAX)) as u32;
            for tail in ["", " ", "           "] {
                assert_eq!(tokens(&format!("{{\"token_ids\":[{value}{tail},7]}}")), Some(vec![value, 7]));
            }
        }
        assert_eq!(tokens("{\"token_ids\":[4294967296]}"), None);
        assert_eq!(tokens("{\"token_ids\":[0,10,0]}"), Some(vec![0, 10, 0]));
    }

    #[test]
    fn only_the_plain_case() {
        for odd in ["[]", "[01]", "[-1]", "[1.0]", "[1e3]", "[1 2]", "[1,]", "[\"1\"]", "[[1]]", "null", "[1"] {
            assert_eq!(tokens(&format!("{{\"token_ids\":{odd}}}")), None, "{odd}");
        }
        assert_eq!(tokens(r#"{"token_ids":[1],"token_ids":[2]}"#), None);
        assert_eq!(tokens(r#"{"token\u005fids":[1],"token_ids":[2]}"#), None);
        assert_eq!(tokens(r#"{"a":{"token_ids":[1]},"b":"\"token_ids","token_ids":[2]}"#), Some(vec![2]));
        assert_eq!(tokens(r#"{"a":"token_ids","b":["token_ids",3],"token_ids":[2]}"#), Some(vec![2]));
        assert_eq!(tokens(r#"["token_ids",[1]]"#), None);
    }
}
