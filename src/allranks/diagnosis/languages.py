"""What shells and the C library say in other languages than English, in which the rules are written.

Python, PyTorch and schedulers do not translate their messages; bash does, by LANG, and what it reports of commands.
Of German, French, Spanish, Italian, Portuguese, Russian, Japanese, Korean and Chinese.
"""

from __future__ import annotations

import re

#: How bash names the line of a script.
_LINE = re.compile(r"\s*[:：]\s*(?:第|行|列|Zeile|ligne|línea|riga|linha|строка|줄) ?(\d+)(?: ?行)?\s*[:：]\s*")
#: Messages that stand at the end of a line, behind a colon: the English one, and its translations.
_MESSAGES = {
    "command not found": (
        "Kommando nicht gefunden.", "Befehl nicht gefunden", "commande introuvable", "orden no encontrada",
        "no se encontró la orden", "comando non trovato", "comando não encontrado", "команда не найдена",
        "コマンドが見つかりません", "명령어를 찾을 수 없음", "未找到命令", "指令找不到",
    ),
    "No such file or directory": (
        "Datei oder Verzeichnis nicht gefunden", "Aucun fichier ou dossier de ce type",
        "No existe el fichero o el directorio", "No existe el archivo o el directorio",
        "File o directory non esistente", "Arquivo ou diretório inexistente", "Нет такого файла или каталога",
        "そのようなファイルやディレクトリはありません", "그런 파일이나 디렉터리가 없습니다", "没有那个文件或目录",
        "沒有此一檔案或目錄",
    ),
    "Permission denied": (
        "Keine Berechtigung", "Permission non accordée", "Permiso denegado", "Permesso negato", "Permissão negada",
        "Отказано в доступе", "許可がありません", "허가 거부", "权限不够", "拒絕不符權限的操作",
    ),
    "No space left on device": (
        "Auf dem Gerät ist kein Speicherplatz mehr verfügbar", "Aucun espace disponible sur le périphérique",
        "No queda espacio en el dispositivo", "Spazio esaurito sul device", "Não há espaço disponível no dispositivo",
        "На устройстве не осталось свободного места", "デバイスに空き領域がありません", "장치에 남은 공간이 없음",
        "设备上没有空间", "裝置上已無多餘空間",
    ),
    "Disk quota exceeded": (
        "Der zugewiesene Plattenplatz (Quota) ist überschritten", "Débordement du quota d'espace disque",
        "Se ha excedido la cuota de disco", "Quota disco superata", "Превышена дисковая квота",
        "ディスク使用量制限を超過しました", "디스크 할당량이 초과됨", "超出磁盘限额", "磁碟配額已滿",
    ),
    "Cannot allocate memory": (
        "Nicht genügend Hauptspeicher verfügbar", "Ne peut allouer de la mémoire", "No se pudo asignar memoria",
        "Impossibile allocare memoria", "Não foi possível alocar memória", "Невозможно выделить память",
        "メモリを確保できません", "메모리를 할당할 수 없습니다", "无法分配内存", "無法配置記憶體",
    ),
}  # fmt: skip
#: What a shell says of a process that a signal has ended: at the line's beginning, or behind the process id.
_SIGNALS = {
    "Killed": (
        "Getötet", "Abgebrochen (Killed)", "Tué", "Processus arrêté", "Matado", "Terminado (killed)", "Ucciso",
        "Убито", "Убит", "強制終了", "죽었음", "已杀死", "強制結束",
    ),
    "Segmentation fault": (
        "Speicherzugriffsfehler", "Adressierungsfehler", "Erreur de segmentation", "Violación de segmento",
        "Errore di segmentazione", "Falha de segmentação", "Ошибка сегментирования", "Ошибка сегментации",
        "セグメンテーションフォルト", "세그멘테이션 오류", "세그먼테이션 오류", "段错误", "程式記憶體區段錯誤",
    ),
    "Bus error": (
        "Bus-Zugriffsfehler", "Bus-Fehler", "Erreur du bus", "Erreur de bus", "Error del bus", "Errore di bus",
        "Erro no barramento", "Ошибка шины", "バスエラー", "버스 오류", "总线错误", "匯流排錯誤",
    ),
    "Illegal instruction": (
        "Ungültiger Maschinenbefehl", "Instruction non permise", "Instrucción ilegal", "Istruzione non consentita",
        "Instrução ilegal", "Недопустимая инструкция", "명령어가 잘못됨", "非法指令", "無效指令",
    ),
    "Aborted": (
        "Abgebrochen (Speicherabzug geschrieben)", "Abandon (core dumped)", "Abortado", "Annullato (core dump creato)",
        "Аварийный останов", "中止 (コアダンプ)", "중지됨", "已放弃", "已中止",
    ),
}  # fmt: skip
#: Small letters of which one is in each line that is translated.
WORDS = tuple(text.lower().rstrip(".") for texts in (_MESSAGES | _SIGNALS).values() for text in texts)


def _any_of(texts: tuple[str, ...]) -> str:
    return "|".join(re.escape(text) for text in texts)


_TRANSLATIONS = [
    *((re.compile(rf"\s*[:：]\s*(?:{_any_of(texts)})\s*$"), f": {english}") for english, texts in _MESSAGES.items()),
    *((re.compile(rf"(^|\d: +\d+ )\s*(?:{_any_of(texts)})(?=\W|$)"), rf"\g<1>{english}")
      for english, texts in _SIGNALS.items()),
]  # fmt: skip


def in_english(text: str) -> str:
    """Return a line with the messages of shells and of the C library in English."""
    translated = _LINE.sub(r": line \1: ", text)
    for pattern, message in _TRANSLATIONS:
        translated = pattern.sub(message, translated)
    return text if translated == text else translated.replace("：", ": ")
