// Says that the token was wrong, if it was.
document.getElementById("refused").hidden = location.search !== "?refused";
